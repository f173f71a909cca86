"""A command as a child process: it comes back after it has ended, and when it could not be started."""

from __future__ import annotations

import errno
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from shapeshift import child_process
from shapeshift.child_process import ChildProcess
from shapeshift.loops import Backoff
from tests.waiting import wait_for


def test_one_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a machine has no memory or no processes left: what serves must not end for a helper."""
    failures = [errno.EAGAIN, errno.ENOMEM, errno.EAGAIN]
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return real(["sleep", "60"], **options)

    monkeypatch.setattr(child_process.subprocess, "Popen", popen)
    monkeypatch.setattr(child_process, "Backoff", lambda: Backoff(0.001, 0.001))
    with ChildProcess("sidecar", [], tmp_path / "logs" / "sidecar.log") as child:
        child.start()

        def came_up() -> bool:
            child.restart_if_ended()
            return child.is_running

        wait_for(came_up, pause_s=0.005)
        assert not failures and child.log.read_text().count("could not be started") == 3
        (first,) = own_children()
        first.kill()
        wait_for(lambda: came_up() and first not in own_children(), pause_s=0.005)
    child.restart_if_ended()
    assert not child.is_running, "it was stopped"


def test_one_that_was_started_is_not_started_twice(tmp_path: Path) -> None:
    with ChildProcess("no-command", [], tmp_path / "log") as child:
        child.start()
        wait_for(lambda: not child.is_running)
        child.start()
        assert not child.is_running and not (tmp_path / "log.1").exists()


def own_children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if one.name() == "sleep"]


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
