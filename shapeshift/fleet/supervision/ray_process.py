"""Starts Ray on a machine: `ray start --block`, in a session of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_START_TIMEOUT_S = 120.0
_PERIOD_S = 0.2
# Ports of the kernel's choice, so that several clusters fit on one machine.
_COMMON = ("--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats", "--object-store-memory=80000000")


def start(options: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start it with its output in `log`. variables: its environment; None: that of this process."""
    program = Path(sys.executable).with_name("ray")
    with log.open("wb") as stream:
        return subprocess.Popen(
            [str(program), "start", "--block", *options, *_COMMON],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )


def has_started(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until it runs; False if it gives up, as it does on a busy machine, or takes longer than two minutes."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(_PERIOD_S)
    return True
