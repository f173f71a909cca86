from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from client.command import main

ROOT = Path(__file__).resolve().parents[2]


def test_a_replay_prints_its_head_and_figures_and_writes_them(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    options = ["--rate", "100", "--duration-s", "0.5", "--seed", "4", "--slo-ms", "60000", "--json", str(path)]
    assert main(["--url", server.url, *options]) == 0
    printed = capsys.readouterr().out
    for part in ("seed=4", "client_hardware: cpu=", "latency p98", "sent late", "within SLO"):
        assert part in printed
    content = json.loads(path.read_text())
    assert content["settings"]["seed"] == 4
    assert content["client_hardware"]["cores"] >= 1
    summary = content["summary"]
    assert summary["ok"] == summary["sent"] == summary["planned"] > 10
    assert summary["within_slo"] == 1.0
    assert len(server.received) == summary["planned"] + 8
    assert server.received[0].parameters["truncate"].bool_param


def test_it_starts_as_a_file_from_any_folder(server: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "client" / "replay.py"), "--url", server.url, "--duration-s", "0.2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "latency p99" in done.stdout


def test_invalid_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--arrivals", "sometimes"]) == 2
    assert "arrivals: got 'sometimes'" in capsys.readouterr().err
    assert main(["--rate", "many"]) == 2
    assert "rate: got 'many'" in capsys.readouterr().err
    assert main(["--arrivals", "csv", "--trace", str(tmp_path / "missing.csv")]) == 2
    assert "missing.csv" in capsys.readouterr().err


def test_a_replay_without_any_success_fails(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.stop()
    assert main(["--url", server.url, "--duration-s", "0.1", "--connect-timeout-s", "0.5"]) == 1
    assert "no inference server answers" in capsys.readouterr().err
