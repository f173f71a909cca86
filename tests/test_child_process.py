"""A command as a child process: it comes back after it has ended, and when it could not be started."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

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

        def is_running() -> bool:
            child.restart_if_ended()
            return child._process is not None and child._process.poll() is None

        wait_for(is_running, pause_s=0.005)
        assert not failures and child.log.read_text().count("could not be started") == 3
        first = child._process
        assert first is not None
        first.kill()
        wait_for(lambda: is_running() and child._process is not first, pause_s=0.005)
    child.restart_if_ended()
    assert child._process is None, "it was stopped"
