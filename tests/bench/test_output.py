"""The files of a benchmark run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.common import output
from bench.polymorph import __main__ as polymorph


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "build" / "bench"


def test_a_simulation_leaves_the_results_of_the_whole_bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_tables(*_: Any) -> Iterator[Any]:
        return iter(())

    monkeypatch.setattr(polymorph.simulated, "tables", no_tables)
    folder.mkdir(parents=True)
    (folder / "polymorph.txt").write_text("hours of work")
    monkeypatch.setattr(sys, "argv", ["polymorph", "--parts", "simulated"])
    assert polymorph.main() == 0
    assert (folder / "polymorph.txt").read_text() == "hours of work"
    written = (folder / "polymorph-simulated.txt").read_text()
    assert "command=python -m bench.polymorph --parts simulated" in written
    assert {file.name for file in folder.iterdir()} == {
        "polymorph.txt",
        "polymorph-simulated.txt",
        "polymorph-simulated.json",
    }


def test_all_parts_in_any_order_are_the_whole_bench() -> None:
    assert output.name_of_parts("x", ["b", "a"], ("a", "b")) == "x"
    assert output.name_of_parts("x", ["a", "turns"], ("a", "b")) == "x-a-turns"


def test_a_table_has_a_line_for_each_row_and_leaves_out_what_a_row_lacks() -> None:
    text = output.table("what", [{"system": "ours", "ms": 1234.56, "failed": 0}, {"system": "others", "ms": 0.123456}])
    assert text.splitlines() == [
        "",
        "what",
        "  system      ms  failed",
        "  ours      1235       0",
        "  others  0.1235",
    ]
