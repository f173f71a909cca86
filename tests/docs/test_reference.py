"""What pages say of the code is what the code gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shapeshift import settings
from shapeshift.fleet.settings import DnsSettings
from shapeshift.fused_decode.model.architecture import FAMILIES as DECODERS
from shapeshift.token_adapt.policy.image_scheduler import ALGORITHMS
from tests.docs import reference
from tests.docs.docs_pages import PAGES, PROJECT, TECHNIQUES, code, prose, section
from tests.docs.meanings import INPUTS, OUTPUTS, PACKAGES_HOLD, PARAMETERS
from tests.fused_decode.families import CONFIGS as COMPARED_DECODERS

REFERENCE = PROJECT / "docs" / "reference.md"
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
# What pages may count, by the words that follow the number.
COUNTS = {
    "techniques": len(TECHNIQUES),
    "decoder families": len(DECODERS),
    "encoder families": len(reference.load("shapeshift.engines.text.families:FAMILIES")),
    "schedulers": len(reference.load("shapeshift.adapter_cache.settings:SCHEDULERS")),
    "planning algorithms": len(ALGORITHMS),
}
# A page says `name` (default value), and so that a test can hold it.
_DEFAULT = re.compile(r"`([a-z_-]+)`\s+\(default\s+`?([^)`,;]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_what_pages_say_of_the_code_is_renewed(page: Path) -> None:
    for name, text in reference.pieces(page):
        assert text == reference.PIECES[name](), f"{page.name}, {name}: run `python -m tests.docs.reference`"


def test_every_piece_is_on_a_page() -> None:
    assert {name for page in PAGES for name, _ in reference.pieces(page)} == reference.PIECES.keys()


def test_every_row_of_the_reference_says_what_it_means() -> None:
    for line in REFERENCE.read_text().splitlines():
        assert not re.match(r"\| `.*\|  \|$", line), line


def test_meanings_are_of_names_that_exist() -> None:
    text = REFERENCE.read_text() + (PROJECT / "docs" / "fused_decode.md").read_text()
    for meanings in (*INPUTS.values(), *OUTPUTS.values(), PARAMETERS):
        for name in meanings:
            assert f"\n| `{name}` |" in text, name
    packages = (PROJECT / "docs" / "architecture.md").read_text()
    assert all(f"\n| `{name}` |" in packages for name in PACKAGES_HOLD)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_counts_are_those_of_the_code(page: Path) -> None:
    for counted, number in COUNTS.items():
        for said in re.findall(rf"\b(\d+|{'|'.join(_NUMBERS)})\s+{counted}\b", prose(page), re.IGNORECASE):
            value = int(said) if said.isdigit() else _NUMBERS.index(said.lower())
            assert value == number, f"{page.name}: {said} {counted}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_defaults_in_prose_are_those_of_the_code(page: Path) -> None:
    rows = [re.findall(r"(?<!\\)\| ([^|]*) (?=\|)", line) for line in REFERENCE.read_text().splitlines()]
    defaults: dict[str, set[str]] = {}
    for row in rows:
        if len(row) == 3 and row[0].startswith("`"):
            defaults.setdefault(code(row[0]).split()[0], set()).add(code(row[1]).removesuffix(".0"))
    for name, value in _DEFAULT.findall(prose(page)):
        assert value.strip() in defaults[name], f"{page.name}: {name}"


def test_every_wall_is_explained() -> None:
    walls = re.findall(r"assert \w+\(PROJECT.*\) == \[\]", (PROJECT / "tests" / "test_walls.py").read_text())
    page = section(PROJECT / "docs" / "architecture.md", "Walls")
    assert len(re.findall(r"^\d+\. ", page, re.MULTILINE)) == len(walls)


def test_removed_settings_are_on_no_page() -> None:
    gone = settings.REMOVED.keys() - {code(row) for row in re.findall(r"^\| (`[^`]+`)", REFERENCE.read_text(), re.M)}
    # A section of a fleet file has what another one had.
    gone -= settings.names(DnsSettings)
    # Inputs of models that generate are no settings.
    gone -= INPUTS["fused_decode"].keys()
    # The keys of policies by hand are no settings.
    for page in (page for page in PAGES if page.name not in ("CHANGELOG.md", "policies.md")):
        named = {code(span) for span in re.findall(r"`[a-z_]+`", prose(page))}
        assert not named & gone, page.name


def test_families_of_decoders_are_those_compared() -> None:
    assert list(DECODERS) == list(COMPARED_DECODERS)


def test_a_stale_piece_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- from the code: errors -->\nstale\n<!-- end -->\n\nBehind.\n")
    assert reference.pieces(page) == [("errors", "stale")]
    page.write_text(reference.renewed(page))
    assert reference.pieces(page) == [("errors", reference.errors())]
    assert page.read_text().startswith("Before.\n") and page.read_text().endswith("\nBehind.\n")
