"""A perf_analyzer that never ends is ended and repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.perf_analyzer import measure
from shapeshift.errors import ShapeshiftError

PROGRAM = """#!/bin/sh
echo run >> {log}
if [ $(wc -l < {log}) -le {sleepy} ]; then exec sleep 60; fi
while [ $# -gt 1 ]; do if [ "$1" = --profile-export-file ]; then cp {answer} "$2"; fi; shift; done
"""
ANSWER = {"experiments": [{"requests": [{"timestamp": 0, "response_timestamps": [2_000_000]}]}]}


def program(folder: Path, sleepy: int) -> Path:
    """Write a fake program whose first `sleepy` runs never end; the file that counts its runs."""
    log, answer = folder / "log", folder / "answer.json"
    answer.write_text(json.dumps(ANSWER))
    made = folder / "perf_analyzer"
    made.write_text(PROGRAM.format(log=log, answer=answer, sleepy=sleepy))
    made.chmod(0o755)
    return log


def test_a_run_that_never_ends_is_repeated(tmp_path: Path) -> None:
    log = program(tmp_path, sleepy=2)
    got = measure("localhost:1", "encode", [{"TEXT": ["a"]}], 1, 10, tmp_path, timeout_s=2.0)
    assert got.latency_ms.tolist() == [2.0]
    assert len(log.read_text().splitlines()) == 4


def test_repeats_are_limited(tmp_path: Path) -> None:
    log = program(tmp_path, sleepy=9)
    with pytest.raises(ShapeshiftError, match="did not end within 1 s in 3 runs"):
        measure("localhost:1", "encode", [{"TEXT": ["a"]}], 1, 10, tmp_path, timeout_s=1.0)
    assert len(log.read_text().splitlines()) == 3
