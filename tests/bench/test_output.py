"""The files of a benchmark run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.common import output


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "build" / "bench"


def test_a_part_leaves_the_results_of_the_whole_bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    (folder / "x.txt").write_text("hours of work")
    monkeypatch.setattr(sys, "argv", ["x", "--parts", "b"])
    result = output.Output("x", {"seed": 3}, output.name_of_parts("x", ["b"], ("a", "b")))
    result.table("what", [{"system": "ours", "ms": 1.5}])
    result.data["rows"] = [1.5]
    result.save()
    assert (folder / "x.txt").read_text() == "hours of work"
    written = (folder / "x-b.txt").read_text()
    assert "command=python -m bench.x --parts b, seed=3" in written and "ours    1.5" in written
    record = json.loads((folder / "x-b.json").read_text())
    assert record["rows"] == [1.5] and record["settings"]["seed"] == 3 and record["hardware"]["cpu"]


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
