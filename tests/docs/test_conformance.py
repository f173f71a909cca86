"""The table of docs/conformance.md: parts, as their tests last ended."""

from __future__ import annotations

from pathlib import Path

from tests.docs.conformance import PAGE, PARTS, PROJECT, rows_of, run, with_rows

TESTS = """
import pytest

def test_measures(record_property):
    record_property("lost", 0)

def test_needs_more():
    pytest.skip("no podman here")

def test_fails():
    assert {passes}
"""


def test_every_part_has_tests_and_rows_are_of_parts() -> None:
    rows = rows_of(PAGE.read_text())
    assert rows and [*rows] == [part for part in PARTS if part in rows]
    for files in PARTS.values():
        assert all((PROJECT / "tests" / file).is_file() for file in files)


def test_a_row_says_what_was_run_left_out_and_measured(tmp_path: Path) -> None:
    file = tmp_path / "test_part.py"
    for passes, ran, failures in ((True, "2", 0), (False, "2, **1 failed**", 1)):
        file.write_text(TESTS.format(passes=passes))
        row, failed = run("a part", [str(file)])
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert (failed, cells[0], *cells[2:]) == (failures, "a part", ran, "1: no podman here", "lost: 0")


def test_rows_of_other_parts_stay() -> None:
    page = PAGE.read_text()
    rows = {part: f"| {part} | 2026-01-01 | 1 |  |  |" for part in PARTS}
    changed = with_rows(page, rows)
    assert rows_of(changed) == rows
    assert changed.partition("## What has never run")[2] == page.partition("## What has never run")[2]
    assert rows_of(with_rows(changed, rows_of(page))) == rows_of(page)
