"""`shapeshift fleet`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.cli.main import main

FLEET = """
name = "demo"
[[nodes]]
name = "a"
grpc = "127.0.0.1:{port}"
metrics = "http://127.0.0.1:{port}/metrics"
"""


def test_a_node_that_does_not_answer_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free_ports: Callable[[int], list[int]]
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(port=free_ports(1)[0]))
    assert main(["fleet", "status", str(file)]) == 0
    assert "no server answers" in capsys.readouterr().out


def test_an_invalid_fleet_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("nam = 1")
    assert main(["fleet", "status", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
