"""A command as a child process: it comes back after it has ended, and when it could not be started."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from shapeshift.child_process import ChildProcess
from tests.waiting import wait_for


def test_one_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves must not end for a helper."""
    now, options = [0.0], [f"--build={tmp_path}", "--server=127.0.0.1:1", "--metrics=http://127.0.0.1:1/metrics"]
    # No process is started with a variable of that length.
    monkeypatch.setenv("TOO_LONG", "x" * (1 << 18))

    def running() -> list[psutil.Process]:
        alive = list[psutil.Process]()
        for one in psutil.Process().children():
            # One that has ended has no command line.
            with contextlib.suppress(psutil.Error):
                alive += [one] * (options[0] in one.cmdline())
        return alive

    def came_up() -> bool:
        now[0] += 100.0
        child.restart_if_ended()
        return child.is_running

    with ChildProcess("sidecar", options, tmp_path / "logs" / "sidecar.log", clock=lambda: now[0]) as child:
        child.start()
        assert not came_up() and not came_up() and child.log.read_text().count("could not be started: [Errno 7]") == 2
        monkeypatch.delenv("TOO_LONG")
        wait_for(came_up, pause_s=0.005)
        # A process that was just started has no command line yet.
        wait_for(lambda: len(running()) == 1)
        (first,) = running()
        first.kill()
        wait_for(lambda: came_up() and first not in running(), pause_s=0.005)
    child.restart_if_ended()
    assert not child.is_running, "it was stopped"


def test_one_that_was_started_is_not_started_twice(tmp_path: Path) -> None:
    with ChildProcess("no-command", [], tmp_path / "log") as child:
        child.start()
        wait_for(lambda: not child.is_running)
        child.start()
        assert not child.is_running and not (tmp_path / "log.1").exists()


def test_one_that_keeps_ending_is_started_again_after_growing_pauses(tmp_path: Path) -> None:
    now, starts = [100.0], []
    with ChildProcess("no-command", [], tmp_path / "log", clock=lambda: now[0]) as child:
        child.start()
        for _ in range(6):
            wait_for(lambda: not child.is_running)
            while not child.is_running:
                now[0] += 0.25
                child.restart_if_ended()
            starts.append(now[0])
        wait_for(lambda: "no-command" in child.last_line())
    pauses = [later - before for before, later in pairwise(starts)]
    assert pauses == sorted(pauses) and pauses[-1] > 8 * pauses[0]
