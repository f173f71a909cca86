"""The facts of the README and the pages, held against the code. test_commands.py runs their commands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from client.plan import Settings as ReplaySettings
from shapeshift.adapter_cache.front import LoraFront
from shapeshift.adapter_cache.policy.scheduling import SchedulingSettings
from shapeshift.adapter_cache.settings import AdapterCacheSettings
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.cascade import settings as cascade_settings
from shapeshift.cascade.front import CascadeFront
from shapeshift.cascade.settings import CascadeSettings, GeneratedCascadeSettings
from shapeshift.cli import main as cli
from shapeshift.cli.examples import how_to_call
from shapeshift.engines.settings import GeneratedSettings, TextEngineSettings
from shapeshift.fused_decode import declarations
from shapeshift.fused_decode import settings as decode_settings
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.fused_decode.settings import ForwardSettings, FusedDecodeSettings, GeneratedDecodeSettings
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.settings import PolymorphSettings, front_signature
from shapeshift.registry_mirror.follower import RegistrySettings
from shapeshift.serving import error_codes, parameters
from shapeshift.token_adapt import settings as image_settings
from shapeshift.token_adapt.front import ImageFront
from shapeshift.token_adapt.settings import EmulatedSettings, TokenAdaptSettings
from shapeshift.triton import keys
from tests.docs.docs_pages import PAGES, PROJECT, TECHNIQUES, anchors, blocks, code, links, prose, table
from tests.docs.docs_sources import modules, texts

README, DOCS = PROJECT / "README.md", PROJECT / "docs"
POLYMORPH, TOKEN_ADAPT, FUSED_DECODE, ADAPTER_CACHE, CASCADE, SERVING = (
    DOCS / f"{name}.md" for name in ("polymorph", "token_adapt", "fused_decode", "adapter_cache", "cascade", "serving")
)
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
        shown = [block.text.strip() for block in blocks(page, "sh", "python")]
        assert any(http in block for block in shown)
        assert grpc in shown


def test_techniques_are_explained_in_the_same_order() -> None:
    order = ["Quick start", "Your own model", "Inputs and outputs", "Parameters", "Metrics", "How it works", "Measured"]
    for name in TECHNIQUES:
        assert re.findall(r"^## (.+)$", prose(DOCS / f"{name}.md"), re.MULTILINE) == [*order, "Limits"]


def test_readme_lists_every_page() -> None:
    listed = {(PROJECT / link.partition("#")[0]).resolve() for link in links(README)}
    assert {page for page in PAGES if page.parent in (DOCS, PROJECT) and page != README} <= listed


def test_make_targets_exist() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    assert {code(row[0]).removeprefix("make ") for row in table(README, "Make targets")} == targets
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
    for block in blocks(README, "pbtxt"):
        folder = tmp_path / "repository" / "my_encoder"
        folder.mkdir(parents=True)
        (folder / "config.pbtxt").write_text(block.text)
        (model,) = front_models(BuildPaths(tmp_path, tmp_path / "build", tmp_path / "repository"), set())
        assert model.name == "my_encoder" and len(block.text.splitlines()) <= 10


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
        (DOCS / "fleet.md", "Registry parameters", RegistrySettings, ""),
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
        POLYMORPH: TextFront.takes,
        TOKEN_ADAPT: ImageFront.takes,
        FUSED_DECODE: GenerateFront.takes,
        ADAPTER_CACHE: LoraFront.takes,
        CASCADE: CascadeFront.takes,
    }
    for page, own in owns.items():
        documented = {code(row[0]) for row in table(page, "Request parameters")}
        assert documented == {*parameters.COMMON, *own}


def test_tensors_are_those_of_the_models() -> None:
    pages = {
        (POLYMORPH, "Inputs and outputs", "Outputs"): front_signature({}),
        (TOKEN_ADAPT, "Inputs", "Outputs"): image_settings.signature({}),
        (FUSED_DECODE, "Inputs", "Outputs"): decode_settings.signature({}),
        (CASCADE, "Inputs and outputs", ""): cascade_settings.signature({}),
    }
    for (page, *headings), signature in pages.items():
        rows = [row for heading in headings if heading for row in table(page, heading)]
        # An input and an output may share a name.
        documented = [(code(row[0]), row[1]) for row in rows]
        tensors = (*signature.inputs, *signature.outputs)
        assert sorted(name for name, _ in documented) == sorted(tensor.name for tensor in tensors)
        for tensor in tensors:
            kind = tensor.data_type.removeprefix("TYPE_").replace("STRING", "BYTES")
            # Dims that are None follow from the checkpoint: at least one.
            axes = f"{len(tensor.dims) - (not signature.max_batch_size)}" if tensor.dims else "1,"
            shape = rf"{kind} \[\w[^,]*(, [^,]+){{{axes}}}\]"
            assert any(name == tensor.name and re.fullmatch(shape, said) for name, said in documented), tensor


def test_defaults_and_ranges_of_generation_are_those_of_the_code() -> None:
    documented = {code(row[0]): (row[2], row[3]) for row in table(FUSED_DECODE, "Inputs")}
    assert documented == {one.name: (one.default, one.range) for one in declarations.INPUTS}
    defaults = SamplingParams()
    for name in (field.name for field in dataclasses.fields(SamplingParams)):
        value = getattr(defaults, name)
        words = {"a new one": (None,), "none": ((), None), "{}": ((),), "`n`": (None,)}
        said = documented[name][0]
        assert value in words[said] if said in words else said == str(value).lower(), name


def test_error_codes_are_those_of_the_code() -> None:
    for page in (POLYMORPH, TOKEN_ADAPT, FUSED_DECODE, CASCADE):
        documented = {code(row[0]) for row in table(page, "Errors")}
        assert documented == {*(name for _, name in error_codes._CODES), "INTERNAL"}


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


def test_commands_are_explained() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for name in cli.COMMANDS:
        assert f"shapeshift {name}" in pages
