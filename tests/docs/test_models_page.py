"""The table of model families is the list of the test that compares each with its own library."""

from __future__ import annotations

from shapeshift.engines.text.families import FAMILIES
from tests.docs.docs_pages import PROJECT, code, table
from tests.engines.families import CONFIGS


def test_the_table_of_families_is_what_is_tested() -> None:
    rows = table(PROJECT / "docs" / "polymorph.md", "Models")
    documented = {code(row[1]): (row[0], row[2]) for row in rows}
    assert documented == {
        name: (family.name, "yes" if family.packs_rows else "no") for name, family in FAMILIES.items()
    }
    assert list(documented) == list(CONFIGS)
