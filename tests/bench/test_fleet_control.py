"""The stub nodes speak what the sidecar reads, and its decisions are made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fleet import control


def test_a_plan_is_decided_from_what_stub_nodes_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FOLDER", tmp_path)
    monkeypatch.setattr(control.time, "sleep", lambda seconds: None)
    with control.stub_nodes(3) as connections:
        row = control.measured(connections, 3, rounds=2)
    assert row["nodes"] == 3
    assert all(row[step] > 0 for step in control.STEPS)
    assert row["sum"] <= row["longest sum"]
