"""The facts of the README and the pages, held against the code. test_commands.py runs their commands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.cli.examples import how_to_call
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.triton import keys
from tests.docs.docs_pages import PAGES, PROJECT, TECHNIQUES, anchors, blocks, code, links, prose, table
from tests.docs.docs_sources import modules, texts

README, DOCS = PROJECT / "README.md", PROJECT / "docs"
SERVING = DOCS / "serving.md"
# The front models, and the page that says how each is called.
FRONTS = {
    "encode": "polymorph",
    "classify_image": "token_adapt",
    "generate": "fused_decode",
    "generate_unary": "fused_decode",
    "generate_lora": "adapter_cache",
    "generate_lora_unary": "adapter_cache",
    "classify_text": "cascade",
}


def test_every_policy_is_explained() -> None:
    from shapeshift.cli.policy import policies

    page = (DOCS / "policies.md").read_text()
    for name, policy in policies().items():
        rows = {code(row[0]): row[1] for row in table(DOCS / "policies.md", name)}
        choices = rows.pop("algorithm", "")
        assert rows.keys() == set(policy.fields)
        assert tuple(re.findall(r"`([a-z_]+)`", choices)) == policy.algorithms
        assert f"policy {name} " in page


def test_pages_repeat_what_the_command_prints() -> None:
    for model, page in FRONTS.items():
        said = how_to_call([model], [PROJECT / "model_repository"], "localhost", 8000, 8001)
        http, grpc = said.removeprefix(f"{model}\n").strip().split("\n\n", 1)
        shown = [block.text.strip() for block in blocks(DOCS / f"{page}.md", "sh", "python")]
        assert any(http in block for block in shown)
        assert grpc in shown


def test_techniques_are_explained_in_the_same_order() -> None:
    order = ["Quick start", "Your own model", "Inputs and outputs", "Settings", "How it works", "Measured"]
    for name in TECHNIQUES:
        assert re.findall(r"^## (.+)$", prose(DOCS / f"{name}.md"), re.MULTILINE) == [*order, "Limits"]


def test_readme_is_read_in_two_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 120
    assert [code(row[0]).partition("]")[0].strip("[") for row in table(README, "Shapeshift")] == list(TECHNIQUES)


def test_pages_are_short() -> None:
    words = [word for page in DOCS.glob("*.md") for word in page.read_text().split() if re.search(r"\w", word)]
    assert len(words) <= 40_000


def test_readme_lists_every_page() -> None:
    listed = {(PROJECT / link.partition("#")[0]).resolve() for link in links(README)}
    assert {page for page in PAGES if page.parent in (DOCS, PROJECT) and page != README} <= listed


def test_make_targets_exist() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    for page in PAGES:
        named = {word for span in re.findall(r"`make ([^`]+)`", prose(page)) for word in re.findall(r"^[a-z]+", span)}
        assert named <= targets, f"{page.name}: {named - targets}"
        for block in blocks(page, "sh"):
            named = set(re.findall(r"^make ([a-z]+)", block.text, re.MULTILINE))
            assert named <= targets, f"{block}: {named - targets}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_commands_of_a_checkout_name_its_environment(page: Path) -> None:
    for block in blocks(page, "sh"):
        if block.heading != "Without a checkout":
            assert not re.search(r"^(shapeshift|python3?) ", block.text, re.MULTILINE), block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(PROJECT), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_model_of_ones_own_is_a_model(tmp_path: Path) -> None:
    (block,) = blocks(DOCS / "engines.md", "pbtxt")
    folder = tmp_path / "repository" / "my_encoder"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(block.text)
    (model,) = front_models(BuildPaths(tmp_path, tmp_path / "build", tmp_path / "repository"), set())
    assert model.name == "my_encoder" and len(block.text.splitlines()) <= 10


def test_defaults_of_generation_are_those_of_the_code() -> None:
    said = {code(row[0]): row[2] for row in table(DOCS / "fused_decode.md", "Inputs")}
    words = {"a new one": (None,), "none": ((), None), "{}": ((),), "`n`": (None,)}
    defaults = SamplingParams()
    for name in (field.name for field in dataclasses.fields(SamplingParams)):
        value = getattr(defaults, name)
        assert value in words[said[name]] if said[name] in words else said[name] == str(value).lower(), name


def test_restricted_interfaces_are_those_of_the_code() -> None:
    rows = table(SERVING, "The key, and what is restricted")
    documented = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    assert documented == keys.RESTRICTED.split(",")


def test_messages_are_those_of_the_code() -> None:
    said = [text for path in modules("shapeshift", "build_engines", "client").values() for text in texts(path)]
    said += (PROJECT / "Makefile").read_text().splitlines()
    for row in table(SERVING, "Messages of this project"):
        pattern = ".*".join(map(re.escape, code(row[0]).split("…")))
        assert any(re.search(pattern, text, re.DOTALL) for text in said), row[0]


def test_a_restart_waits_as_long_as_the_code() -> None:
    from shapeshift.cli import supervisor

    waits = f"started again after {supervisor._FIRST_PAUSE_S:g} s"
    assert waits in " ".join(prose(SERVING).split())
