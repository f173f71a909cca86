"""`shapeshift record` beside a process that records: Ctrl-C ends it early, and keeps what arrived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shapeshift.cli.main import main
from shapeshift.serving import events
from shapeshift.serving.events import Ring
from shapeshift.workloads import trace

# Where the tests run in the background, what they start ignores Ctrl-C.
HEEDING_CTRL_C = """
import signal, sys
from shapeshift.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""


def record(build: Path, file: Path) -> subprocess.Popen[str]:
    words = ("record", "encode", file, "--build", build, "--seconds", "600")
    command = [sys.executable, "-c", HEEDING_CTRL_C, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_an_interrupted_recording_keeps_what_has_arrived(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "run" / "events"
    folder.mkdir(parents=True)
    ring = Ring(folder / f"encode.{os.getpid()}{events.SUFFIX}")
    process = record(tmp_path / "build", tmp_path / "trace.csv")
    end = time.monotonic() + 60
    while not ring.wants_requests and time.monotonic() < end:
        time.sleep(0.05)
    # The clock of a recording begins before it looks for requests.
    ring.write("requests", {"rows": [{"at": time.monotonic(), "length": 7}, {"at": time.monotonic(), "length": 9}]})
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert trace.read(tmp_path / "trace.csv").length.tolist() == [7, 9]
    assert "trace.csv: 2 requests of encode" in said


@pytest.mark.parametrize("command", ["record", "plan"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_recorded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent" / "trace.csv")
    words = {
        "record": ["record", "encode", absent],
        "plan": ["plan", str(tmp_path / "plan.toml"), "--from-server", "encode", "--trace", absent],
    }
    assert main([*words[command], "--build", str(tmp_path)]) == 2
    assert "FILE.csv: got" in capsys.readouterr().err
