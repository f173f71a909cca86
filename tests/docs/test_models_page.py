"""The tables of model families are the lists of the tests that compare each with its own library."""

from __future__ import annotations

from shapeshift.engines.text.families import FAMILIES
from shapeshift.fused_decode.model.architecture import from_config
from shapeshift.token_adapt.checkpoints import huggingface, timm
from tests.docs.docs_pages import PROJECT, code, table
from tests.engines.families import CONFIGS
from tests.fused_decode.families import CONFIGS as DECODERS
from tests.token_adapt.vision_families import CASES


def test_the_table_of_encoders_is_what_is_tested() -> None:
    rows = table(PROJECT / "docs" / "polymorph.md", "Models")
    documented = {code(row[1]): (row[0], row[2]) for row in rows}
    assert documented == {
        name: (family.name, "yes" if family.packs_rows else "no") for name, family in FAMILIES.items()
    }
    assert list(documented) == list(CONFIGS)


def test_the_table_of_decoders_is_what_is_tested() -> None:
    documented = {code(row[1]): row[2] for row in table(PROJECT / "docs" / "fused_decode.md", "Models")}
    made = {name: from_config({**config, "model_type": name}) for name, config in DECODERS.items()}
    assert documented == {
        name: "one operation" if architecture.is_one_operation else "kernel by kernel"
        for name, architecture in made.items()
    }
    assert list(documented) == list(DECODERS)


def test_the_table_of_vision_families_is_what_is_tested() -> None:
    names = {"architecture": timm.FAMILY} | {key: family.name for key, family in huggingface.FAMILIES.items()}
    compared: dict[str, list[str]] = {key: [] for key in names}
    for case in CASES:
        compared["architecture" if case.family == "timm" else case.family].append(case.variant)
    rows = table(PROJECT / "docs" / "token_adapt.md", "Families")
    documented = {code(row[1]): (row[0], row[2]) for row in rows}
    assert documented == {key: (name, ", ".join(compared[key])) for key, name in names.items()}
