"""`shapeshift serve` with workers: the sidecar is its child."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.sidecar.child import SidecarProcess
from tests.sidecar.project import BACKENDS, Command, Project, wait_until

pytestmark = pytest.mark.server
Start = Callable[..., Command]


@pytest.fixture
def served(command: Start, project: Project) -> Command:
    ports = [f"--{name}-port={port}" for name, port in project.settings.ports.items()]
    return command("serve", "--no-gateway", "--backends", str(BACKENDS), *ports)


def processes_of(project: Project) -> list[str]:
    """The command lines of the running processes of the project, without `serve` itself."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(project.build) in line and " serve " not in line:
            found.append(line)
    return found


def test_serve_restarts_the_sidecar_and_leaves_nothing_behind(served: Command, project: Project) -> None:
    served.wait_for("Ctrl-C stops the server")
    # Workers are not in the list of models.
    assert "\nenc\nworkers of enc: " in served.output
    first = project.report()["pid"]
    assert project.report()["plans"]["enc"]["workers"] == 3
    os.kill(first, signal.SIGKILL)
    second = wait_until(
        lambda: project.report()["pid"] not in (first, None) and project.report()["pid"], "another sidecar"
    )
    assert "sidecar" in Path(f"/proc/{second}/cmdline").read_text()
    assert any("tritonserver" in line for line in processes_of(project))
    served.end(signal.SIGKILL)
    wait_until(lambda: processes_of(project) == [], "nothing is left behind")


def test_serve_stops_the_sidecar_before_the_server(served: Command, project: Project) -> None:
    served.wait_for("Ctrl-C stops the server")
    sidecar = project.report()["pid"]
    assert served.end(signal.SIGTERM) == 0
    assert not Path(f"/proc/{sidecar}").exists()
    assert processes_of(project) == []
    log = (project.run / "sidecar.log").read_text()
    assert log.endswith("sidecar stopped\n")
    assert log.count("no server answers") <= 1


def test_a_sidecar_that_keeps_ending_is_restarted_with_growing_pauses(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("shapeshift.child_process.time.monotonic", lambda: now[0])
    sidecar = SidecarProcess(project.settings, 120.0)
    sidecar._command = [sys.executable, "-c", "print('here')"]
    starts = []
    with sidecar:
        sidecar.start()
        for _ in range(400):
            assert sidecar._process is not None
            process = sidecar._process
            process.wait()
            now[0] += 0.25
            sidecar.restart_if_ended()
            if sidecar._process is not process:
                starts.append(now[0])
    pauses = [later - before for before, later in zip(starts, starts[1:], strict=False)]
    assert len(pauses) >= 5
    assert pauses == sorted(pauses)
    assert pauses[-1] > 8 * pauses[0]
    assert sidecar.last_line() == "here"
