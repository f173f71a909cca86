"""`shapeshift serve` with workers: the sidecar is its child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

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
