"""The README's and the documentation's commands, run as they stand, and their facts, held against the code."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client.plan import Settings as ReplaySettings
from shapeshift.adapter_cache.policy.scheduling import SchedulingSettings
from shapeshift.adapter_cache.service import AdapterService
from shapeshift.adapter_cache.settings import AdapterCacheSettings
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.cascade import front as classify_front
from shapeshift.cascade.settings import CascadeSettings, GeneratedCascadeSettings
from shapeshift.cli import main as cli
from shapeshift.engines.settings import GeneratedSettings, TextEngineSettings
from shapeshift.fused_decode import service
from shapeshift.fused_decode.sampling_params import RETURNS, RequestParser
from shapeshift.fused_decode.settings import ForwardSettings, FusedDecodeSettings, GeneratedDecodeSettings
from shapeshift.polymorph import front
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.serving import error_codes, parameters
from shapeshift.token_adapt import front as image_front
from shapeshift.token_adapt.settings import EmulatedSettings, TokenAdaptSettings
from shapeshift.triton import keys, model_config
from shapeshift.triton.embedded.server import TritonServer
from tests.docs.docs_pages import PAGES, PROJECT, Block, anchors, blocks, code, links, prose, table
from tests.docs.docs_sources import metric_names, modules, texts
from tests.fakes import PbUtils

README, DOCS = PROJECT / "README.md", PROJECT / "docs"
POLYMORPH, TOKEN_ADAPT, FUSED_DECODE, ADAPTER_CACHE, CASCADE, SERVING = (
    DOCS / f"{name}.md" for name in ("polymorph", "token_adapt", "fused_decode", "adapter_cache", "cascade", "serving")
)
BUILD = PROJECT / "build"
# The front models, and the page that says how each is called.
FRONTS = {
    "encode": README,
    "classify_image": TOKEN_ADAPT,
    "generate": FUSED_DECODE,
    "generate_unary": FUSED_DECODE,
    "generate_lora": ADAPTER_CACHE,
    "generate_lora_unary": ADAPTER_CACHE,
    "classify_text": CASCADE,
}
Run = Callable[[Block], str]


@pytest.fixture(scope="module")
def server(
    make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server with the models that the pages ask."""
    for file in (BUILD / "repository" / model / "config.pbtxt" for model in FRONTS):
        if not file.is_file():
            pytest.skip(f"no {file}: run `make engines`")
    models = (*FRONTS, "classify_text_large")
    with make_server((BUILD / "repository",), models, tmp_path_factory.mktemp("run")) as running:
        yield running.wait_ready(timeout_s=120)


@pytest.fixture
def run(server: TritonServer) -> Run:
    """A function that runs a block against the server and returns what it writes to standard output."""
    settings = server.settings
    replacements = {
        "localhost:8000": server.http_url,
        "localhost:8001": server.grpc_url,
        "localhost:8002": f"{settings.reachable}:{settings.metrics_port}",
        "build/run": str(settings.run_directory),
    }

    def execute(block: Block) -> str:
        text = block.text
        for default, actual in replacements.items():
            text = text.replace(default, actual)
        return execute_text(text, block)

    return execute


def execute_text(text: str, block: Block) -> str:
    if block.language == "python":
        command = [sys.executable, "-c", text]
    else:
        # The pages name this project's own environment; the tests run in one that may lie elsewhere.
        text = text.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        text = re.sub(r"^make\b", "make --dry-run", text, flags=re.MULTILINE)
        command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{block}: {text}\n{done.stdout}{done.stderr}"
    return done.stdout


def commands(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, *languages)]


def needs_server(block: Block) -> bool:
    return block.language == "python" or re.search(r"localhost|client/", block.text) is not None


WITH_SERVER = [block for block in commands("sh", "python") if needs_server(block)]
WITHOUT_SERVER = [block for block in commands("sh", "python") if not needs_server(block)]


@pytest.mark.server
@pytest.mark.parametrize("block", WITH_SERVER, ids=str)
def test_commands_that_call_the_server(block: Block, run: Run) -> None:
    assert run(block).strip(), f"{block} says nothing"


@pytest.mark.parametrize("block", WITHOUT_SERVER, ids=str)
def test_other_commands(block: Block) -> None:
    assert execute_text(block.text, block).strip(), f"{block} says nothing"


@pytest.mark.parametrize("block", blocks(DOCS / "policies.md", "json"), ids=str)
def test_policies_answer_as_written(block: Block) -> None:
    asked = [other for other in blocks(block.page, "sh") if other.line < block.line][-1]
    assert json.loads(execute_text(asked.text, asked)) == json.loads(block.text)


def test_every_policy_is_explained() -> None:
    from shapeshift.cli.policy import policies

    page = (DOCS / "policies.md").read_text()
    for name, policy in policies().items():
        assert {code(row[0]) for row in table(DOCS / "policies.md", name)} == set(policy.fields)
        assert f"policy {name} " in page


def test_pages_repeat_what_serve_prints() -> None:
    for model, page in FRONTS.items():
        said = (PROJECT / "model_repository" / model / "how_to_call.txt").read_text()
        said = said.replace("{http_port}", "8000").replace("{grpc_port}", "8001")
        http, grpc = said.strip().split("\n\n", 1)
        shown = [block.text.strip() for block in blocks(page, "sh", "python")]
        assert any(http in block for block in shown)
        assert grpc in shown


def test_make_targets_exist() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    assert {code(row[0]).removeprefix("make ") for row in table(README, "Make targets")} == targets
    for page in PAGES:
        named = {word for span in re.findall(r"`make ([^`]+)`", prose(page)) for word in re.findall(r"^[a-z]+", span)}
        assert named <= targets, f"{page.name}: {named - targets}"
    for block in commands("sh", "console"):
        named = set(re.findall(r"^(?:\$ )?make ([a-z]+)", block.text, re.MULTILINE))
        assert named <= targets, f"{block}: {named - targets}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(PROJECT), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_model_of_ones_own_is_a_model(tmp_path: Path) -> None:
    for block in blocks(README, "pbtxt"):
        folder = tmp_path / "repository" / "my_encoder"
        folder.mkdir(parents=True)
        (folder / "config.pbtxt").write_text(block.text)
        (model,) = front_models(BuildPaths(tmp_path, tmp_path / "build", tmp_path / "repository"), set())
        assert model.name == "my_encoder"


@pytest.mark.parametrize(
    ("page", "heading", "settings", "prefix"),
    [
        (POLYMORPH, "Engine parameters", TextEngineSettings, ""),
        (POLYMORPH, "Serving parameters", PolymorphSettings, ""),
        (POLYMORPH, "Generated parameters", GeneratedSettings, ""),
        (TOKEN_ADAPT, "Adaptation parameters", TokenAdaptSettings, ""),
        (TOKEN_ADAPT, "Emulated parameters", EmulatedSettings, ""),
        (FUSED_DECODE, "Loop parameters", FusedDecodeSettings, ""),
        (FUSED_DECODE, "Forwarding parameters", ForwardSettings, ""),
        (FUSED_DECODE, "Generated parameters", GeneratedDecodeSettings, ""),
        (ADAPTER_CACHE, "Adapter parameters", AdapterCacheSettings, ""),
        (DOCS / "adapter_cache_scheduling.md", "Scheduling parameters", SchedulingSettings, ""),
        (CASCADE, "Cascade parameters", CascadeSettings, ""),
        (CASCADE, "Generated parameters", GeneratedCascadeSettings, ""),
        (DOCS / "client.md", "Open-loop replay", ReplaySettings, "--"),
    ],
)
def test_settings_are_those_of_the_code(page: Path, heading: str, settings: type, prefix: str) -> None:
    documented = {code(row[0]): code(row[1]) for row in table(page, heading)}
    words = {"": "none" if prefix else "empty", "None": "none", "True": "true", "False": "false"}
    declared = {}
    for field in dataclasses.fields(settings):
        default = "required" if field.default is dataclasses.MISSING else str(field.default)
        declared[prefix + (field.name.replace("_", "-") if prefix else field.name)] = words.get(default, default)
    assert documented == declared


def test_serve_options_are_those_of_the_code() -> None:
    import argparse

    from shapeshift.cli import serve

    parser = argparse.ArgumentParser(add_help=False)
    serve.add_arguments(parser)
    documented = {code(row[0]).split()[0]: code(row[1]) for row in table(SERVING, "Options")}
    declared = {action.option_strings[0]: action.default for action in parser._actions}
    assert documented.keys() == declared.keys()
    stated = {name: str(default) for name, default in declared.items() if default not in (None, False)}
    assert {name: documented[name] for name in stated} == stated


def test_request_parameters_are_those_of_the_code() -> None:
    owns = {
        POLYMORPH: front._OWN_PARAMETERS,
        TOKEN_ADAPT: image_front._OWN_PARAMETERS,
        FUSED_DECODE: service.OWN_PARAMETERS,
        ADAPTER_CACHE: AdapterService.own_parameters,
        CASCADE: classify_front._OWN_PARAMETERS,
    }
    for page, own in owns.items():
        documented = {code(row[0]) for row in table(page, "Request parameters")}
        assert documented == {*parameters.COMMON, *own}


def test_tensors_are_those_of_the_models() -> None:
    listed = {TOKEN_ADAPT: TOKEN_ADAPT, FUSED_DECODE: FUSED_DECODE, ADAPTER_CACHE: FUSED_DECODE}
    pages = {model: listed[page] for model, page in FRONTS.items() if page in listed}
    for model, page in pages.items():
        config = model_config.read(PROJECT / "model_repository" / model / "config.pbtxt")
        for heading, tensors in (("Inputs", config.input), ("Outputs", config.output)):
            documented = {code(row[0]) for row in table(page, heading)}
            assert documented == {tensor.name for tensor in tensors}
    config = model_config.read(PROJECT / "model_repository" / "classify_text" / "config.pbtxt")
    documented = {code(row[0].removeprefix("output ")) for row in table(CASCADE, "Inputs and outputs")}
    assert documented == {tensor.name for tensor in (*config.input, *config.output)} | {"TEXT_PAIR"}
    named = {"text_input", "stream", "sampling_parameters", "exclude_input_in_output", "stop_id", *RETURNS}
    assert named | set(RequestParser(PbUtils(), 2)._checks) == {code(row[0]) for row in table(FUSED_DECODE, "Inputs")}


def test_error_codes_are_those_of_the_code() -> None:
    for page in (POLYMORPH, TOKEN_ADAPT, FUSED_DECODE, CASCADE):
        documented = {code(row[0]) for row in table(page, "Errors")}
        assert documented == {*(name for _, name in error_codes._CODES), "INTERNAL"}


def test_restricted_interfaces_are_those_of_the_code() -> None:
    rows = table(SERVING, "The key, and what is restricted")
    documented = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    assert documented == keys.RESTRICTED.split(",")


METRICS = (POLYMORPH, TOKEN_ADAPT, FUSED_DECODE, ADAPTER_CACHE, CASCADE)
DOCUMENTED_METRICS = {code(row[0]) for page in METRICS for row in table(page, "Metrics")}


def test_metrics_are_those_of_the_code() -> None:
    assert metric_names() == DOCUMENTED_METRICS


@pytest.mark.server
def test_metrics_are_those_of_the_server(server: TritonServer) -> None:
    # `encode` has no workers: what the page says of routers alone is not there.
    of_routers = {code(row[0]) for row in table(POLYMORPH, "Metrics") if row[2].startswith("router: ")}
    assert len(of_routers) > 4
    of_adapters = table(ADAPTER_CACHE, "Metrics")
    later = {code(row[0]) for row in of_adapters if row[2].startswith("once ")}
    # `generate_lora` serves in order of arrival.
    of_queues = {code(row[0]) for row in of_adapters if row[2].startswith("`chameleon`: ")}
    assert later and of_queues
    wanted = DOCUMENTED_METRICS - of_routers - of_queues
    exported: set[str] = set()
    end = time.monotonic() + 30
    # A front exports once a second, one metric after the other.
    while exported | later != wanted and time.monotonic() < end:
        time.sleep(0.2)
        with urllib.request.urlopen(server.metrics_url, timeout=5) as answer:
            exported = set(re.findall(r"^(shapeshift_\w+)", answer.read().decode(), re.MULTILINE))
    assert exported | later == wanted


def test_messages_are_those_of_the_code() -> None:
    said = [text for path in modules("shapeshift", "build_engines", "client").values() for text in texts(path)]
    said += (PROJECT / "Makefile").read_text().splitlines()
    for row in table(SERVING, "Messages of this project"):
        pattern = ".*".join(map(re.escape, code(row[0]).split("…")))
        assert any(re.search(pattern, text, re.DOTALL) for text in said), row[0]


def test_commands_are_explained() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for name in cli.COMMANDS:
        assert f"shapeshift {name}" in pages
