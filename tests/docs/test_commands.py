"""The commands and snippets of the pages, run as they stand, in a copy of the project and against one server."""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from shapeshift.cli.gateway import child
from shapeshift.cli.main import COMMANDS as COMMANDS_OF_SHAPESHIFT
from shapeshift.fleet import settings as fleet_settings
from shapeshift.gateway.http.meter import GatewayMetrics
from shapeshift.triton.embedded.server import TritonServer
from tests.docs.docs_pages import PAGES, PROJECT, TECHNIQUES, Block, blocks, prose
from tests.docs.docs_sources import declared_metrics, exported_names
from tests.docs.project_copy import MODELS, copy_project, own_files
from tests.waiting import wait_for

DOCS = PROJECT / "docs"
OWN_MODEL = "Your own model"
SERVED = (
    *("encode", "classify_image", "classify_text", "classify_text_large"),
    *("generate", "generate_unary", "generate_lora", "generate_lora_unary", "chat"),
)
# Languages whose blocks are commands; blocks that tests read; output, which nothing reads.
COMMANDS, READ, OUTPUT = ("sh", "python"), ("json", "yaml", "pbtxt", "ini", "toml"), ("text",)
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in BLOCKS if block.language in COMMANDS and not block.not_run and block.heading != OWN_MODEL]
# What the commands of the policies' page answer: the block of JSON below each.
ANSWERS = {
    [other for other in blocks(block.page, "sh") if other.line < block.line][-1]: json.loads(block.text)
    for block in blocks(DOCS / "policies.md", "json")
}
# How Triton answers a request over HTTP that it refuses.
REFUSAL = '{"error":'
Run = Callable[[Block], str]


def needs_server(block: Block) -> bool:
    return block.language == "python" or re.search(r"localhost|client/|shapeshift status", block.text) is not None


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_files(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(make_server: Callable[..., TritonServer], project: Path) -> Iterator[TritonServer]:
    """A server with the models that the pages call."""
    for file in (project / "build" / "repository" / model / "config.pbtxt" for model in SERVED):
        if not file.is_file():
            pytest.skip(f"no {file}: run `make engines`")
    with make_server((project / "build" / "repository",), SERVED, project / "build" / "run") as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def gateway(server: TritonServer, free_ports: Callable[[int], list[int]]) -> Iterator[str]:
    """HOST:PORT of a gateway before the server that has looked at its models."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with child(server.settings, port) as process:
        process.start()
        wait_for(lambda: b"classify_text" in _models(address), timeout_s=60, pause_s=0.2)
        yield address


def _models(address: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://{address}/v1/models", timeout=60) as answer:
            return bytes(answer.read())
    except OSError:
        return b""


@pytest.fixture
def run(server: TritonServer, gateway: str, project: Path) -> Run:
    """A function that runs a block against the server and returns what it writes to standard output."""

    def run(block: Block) -> str:
        return execute(_addressed(block.text, server).replace("localhost:8080", gateway), block, project)

    return run


def _addressed(text: str, server: TritonServer) -> str:
    settings = server.settings
    actual = (server.http_url, server.grpc_url, f"{settings.reachable}:{settings.metrics_port}")
    for port, address in zip((8000, 8001, 8002), actual, strict=True):
        text = text.replace(f"localhost:{port}", address)
    return text


def execute(text: str, block: Block, folder: Path, **environment: str) -> str:
    """Run the text of a block in `folder`; returns standard output. The test fails where the status is not 0."""
    if block.language == "python":
        command = [sys.executable, "-c", text]
    else:
        # The pages name this project's own environment; the tests run in one that may lie elsewhere.
        text = re.sub(r"(?<![\w/])\.venv/bin/", f"{Path(sys.executable).parent}/", text)
        text = re.sub(r"^make\b", "make --dry-run", text, flags=re.MULTILINE)
        command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{block}: {text}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_answer_of_the_policies_is_compared() -> None:
    assert len(ANSWERS) > 15 and set(ANSWERS) <= {block for block in RUN if not needs_server(block)}


def test_blocks_know_their_heading_and_why_they_are_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n```sh\n# no heading\n```\n\n## Two\n\n<!-- not run: no disk -->\n```sh\nrm -r /\n```\n")
    found = [(block.line, block.heading, block.text, block.not_run) for block in blocks(page)]
    assert found == [(3, "One", "# no heading\n", ""), (10, "Two", "rm -r /\n", "no disk")]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.language in (*COMMANDS, *READ, *OUTPUT), f"{block}: no test knows `{block.language}`"
    if block.language in OUTPUT:
        assert not re.search(r"^\$ ", block.text, re.MULTILINE), f"{block} has a command: make it a block of its own"
    assert not (block.not_run and block.language not in COMMANDS), f"{block} is not a command"


@pytest.mark.long
@pytest.mark.server
@pytest.mark.parametrize("block", [block for block in RUN if needs_server(block)], ids=str)
def test_commands_that_call_the_server(block: Block, run: Run) -> None:
    said = run(block)
    assert said.strip() and REFUSAL not in said, f"{block}: {said}"


@pytest.mark.parametrize("block", [block for block in RUN if not needs_server(block)], ids=str)
def test_other_commands(block: Block, project: Path) -> None:
    said = execute(block.text, block, project)
    assert said.strip(), f"{block} says nothing"
    assert block not in ANSWERS or json.loads(said) == ANSWERS[block]


@pytest.mark.long
@pytest.mark.server
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_own_models_are_built_and_answer(technique: str, server: TritonServer, project: Path, models: Path) -> None:
    said = ""
    for block in blocks(DOCS / f"{technique}.md"):
        if block.heading == OWN_MODEL and not block.not_run:
            text = re.sub(rf"(?<!v2){MODELS}", f"{models}/", block.text)
            text = _without_set_up(_addressed(text, server), server)
            said = execute(text, block, project, SHAPESHIFT_KEY=server.key)
    assert said.strip() and REFUSAL not in said, f"{technique}: the last block calls the model\n{said}"


def _without_set_up(text: str, server: TritonServer) -> str:
    """The commands behind `make engines` and `make serve`; the latter loads into the server that runs already."""
    shapeshift = f"{Path(sys.executable).parent}/shapeshift"
    replaced = []
    for line in text.splitlines():
        if made := re.fullmatch(r"make engines MODELS=(\S+)", line):
            line = f"{shapeshift} engines {made[1].replace(',', ' ')}"
        elif served := re.fullmatch(r"make serve MODELS=(\S+)", line):
            line = f"{shapeshift} reload --server {server.grpc_url} {served[1].replace(',', ' ')}"
        assert not line.startswith("make "), line
        replaced.append(line)
    return "\n".join(replaced)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_yaml_can_be_read(block: Block) -> None:
    assert yaml.safe_load(block.text)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=str)
def test_toml_is_a_fleet_file(block: Block, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(block.text)
    assert fleet_settings.read(tmp_path / "fleet.toml", "a").name


def take(words: Sequence[str]) -> set[str]:
    """Let a command of `shapeshift` read its arguments, without running it. Returns all options that it has.

    Ends the program where it takes them not.
    """
    parser = argparse.ArgumentParser(prog=f"shapeshift {words[0]}")
    importlib.import_module(COMMANDS_OF_SHAPESHIFT[words[0]][0]).add_arguments(parser)
    if words[1:]:
        parser.parse_args(words[1:])
    return {option for one in parsers(parser) for action in one._actions for option in action.option_strings}


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser, and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from parsers(one)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.not_run or (block in RUN and needs_server(block))], ids=str
)
def test_commands_that_a_usual_run_leaves_out_are_read(block: Block) -> None:
    if block.language == "python":
        for line in re.findall(r"^from shapeshift\S+ import .+$", block.text, re.MULTILINE):
            exec(line, {})
        compile(block.text, str(block), "exec")
        return
    subprocess.run(["bash", "-n", "-c", block.text], check=True)
    text = block.text.replace("\\\n", " ")
    for call in re.findall(r"(?:^|\s)(?:\.venv/bin/)?shapeshift ([a-z][^|>&\n]*)$", text, re.MULTILINE):
        take(shlex.split(call))
    for payload in re.findall(r"-d '(\{.*\})'", text):
        json.loads(re.sub(r"'\$\(.*?\)'", "", payload))
    for file in re.findall(r"\bdocker/[\w.]+", text):
        assert (PROJECT / file).is_file(), file


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_commands_in_prose_have_the_options_that_they_name(page: Path) -> None:
    for command, rest in re.findall(r"`(?:\.venv/bin/)?shapeshift ([a-z]+)([^`]*)`", prose(page)):
        assert {*re.findall(r"--[a-z-]+", rest)} <= take([command]), f"shapeshift {command}{rest}"
    ours = r"python3? -m ((?:bench|client|docker|tests)(?:\.[\w.]*\w)?)([^`\n]*)"
    for module, rest in re.findall(ours, page.read_text()):
        found = importlib.util.find_spec(module)
        assert found is not None, module
        folder = Path(*(found.submodule_search_locations or [str(found.origin)]))
        files = [*folder.glob("*.py"), *(PROJECT / "bench/common").glob("*.py")] if folder.is_dir() else [folder]
        source = "".join(file.read_text() for file in files)
        assert [one for one in re.findall(r"--[a-z-]+", rest) if f'"{one}"' not in source] == [], module


def test_containers_and_units_run_commands_that_exist() -> None:
    for name in ("compose.yaml", "compose.cpu.yaml"):
        services = yaml.safe_load((PROJECT / "docker" / name).read_text())["services"]
        for service in services.values():
            if service.get("command", [""])[0] in COMMANDS_OF_SHAPESHIFT:
                take([one.replace("${MODELS:-}", "") for one in service["command"]])
    (default,) = re.findall(r"^CMD (\[.*\])$", (PROJECT / "docker/Dockerfile.cpu").read_text(), re.MULTILINE)
    take(json.loads(default))
    units = [block for block in BLOCKS if block.language == "ini"]
    assert units
    for block in units:
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(block.text)
        program, *words = unit["Service"]["ExecStart"].split()
        assert Path(program).name == "shapeshift"
        take(words)


METRICS = DOCS / "observability.md"
NO_METRICS = {"shapeshift_key"}
# Series that a server without workers, fleets and size queues lacks, or that begin with the first event.
ABSENT = re.compile(
    r"shapeshift_(workers?_|retries|timeouts|fleet_nodes|requests_(forwarded|on_other)|adapter_(requests|queue|bypass|squash))"
)


def test_pages_and_rules_name_metrics_that_exist() -> None:
    known = exported_names() | set(declared_metrics())
    known |= set(re.findall(r"^# TYPE (\w+)", GatewayMetrics().page(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"\bshapeshift_[a-z_]+[a-z]\b(?!\*)", page.read_text()))
        named = {name for name in named if not any(other.startswith(f"{name}_") for other in known)} - {
            "shapeshift_key"
        }
        assert named <= known | NO_METRICS, f"{page.name}: {named - known}"


@pytest.mark.long
@pytest.mark.server
def test_metrics_are_those_of_the_server(server: TritonServer) -> None:
    wanted = {name for name in declared_metrics() if not ABSENT.match(name)}
    assert len(wanted) > 40
    found: set[str] = set()
    end = time.monotonic() + 120
    # A front exports once a second, one metric after the other.
    while not wanted <= found and time.monotonic() < end:
        time.sleep(0.2)
        with urllib.request.urlopen(server.metrics_url, timeout=60) as answer:
            page = answer.read().decode()
        found = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"^(shapeshift_\w+)", page, re.M)}
    assert wanted <= found
    assert found <= set(declared_metrics())
    named = set(re.findall(r"\bnv_\w+", METRICS.read_text()))
    assert named <= set(re.findall(r"^(nv_\w+)", page, re.MULTILINE))
