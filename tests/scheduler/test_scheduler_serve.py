"""`shapeshift serve` with workers: the sidecar is its child."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.scheduler.child import SidecarProcess
from tests.scheduler.house import BACKENDS, Command, House, wait_until

pytestmark = pytest.mark.server
Start = Callable[..., Command]


@pytest.fixture
def served(command: Start, house: House) -> Command:
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), house.ports, strict=True)]
    return command("serve", "--backends", str(BACKENDS), *ports)


def processes_of(house: House) -> list[str]:
    """What runs for the house, apart from what a test has started itself."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(house.build) in line and " serve " not in line:
            found.append(line)
    return found


def test_serve_loads_the_workers_keeps_the_sidecar_and_leaves_nothing(served: Command, house: House) -> None:
    served.wait_for("Ctrl-C stops the server")
    # Worker folders are no models to be loaded or called.
    assert "models: enc\n" in served.said
    assert "workers of enc: " in served.said
    first = house.report()["pid"]
    assert house.report()["plans"]["enc"]["workers"] == 3
    os.kill(first, signal.SIGKILL)
    second = wait_until(lambda: house.report()["pid"] not in (first, None) and house.report()["pid"], "another sidecar")
    assert "scheduler" in Path(f"/proc/{second}/cmdline").read_text()
    assert any("tritonserver" in line for line in processes_of(house))
    served.end(signal.SIGKILL)
    wait_until(lambda: processes_of(house) == [], "nothing is left behind")


def test_serve_stops_the_sidecar_before_the_server(served: Command, house: House) -> None:
    served.wait_for("Ctrl-C stops the server")
    sidecar = house.report()["pid"]
    assert served.end(signal.SIGTERM) == 0
    assert not Path(f"/proc/{sidecar}").exists()
    assert processes_of(house) == []
    log = (house.run / "scheduler.log").read_text()
    assert log.endswith("scheduler stopped\n")
    assert log.count("no server answers") <= 1


def test_a_sidecar_that_keeps_ending_is_started_ever_later(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("shapeshift.scheduler.child.time.monotonic", lambda: now[0])
    sidecar = SidecarProcess(house.settings, 120.0)
    sidecar._command = [sys.executable, "-c", "print('here')"]
    starts = []
    with sidecar:
        sidecar.start()
        for _ in range(400):
            assert sidecar._process is not None
            process = sidecar._process
            process.wait()
            now[0] += 0.25
            sidecar.keep()
            if sidecar._process is not process:
                starts.append(now[0])
    pauses = [later - before for before, later in zip(starts, starts[1:], strict=False)]
    assert len(pauses) >= 5
    assert pauses == sorted(pauses)
    assert pauses[-1] > 8 * pauses[0]
    assert sidecar.last_line() == "here"
