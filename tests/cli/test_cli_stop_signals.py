"""The event that signals set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from shapeshift.cli.stop_signals import stop_event

# The signal comes while the main thread is inside a method of the event, here of `wait` or of a handler before.
INSIDE_THE_EVENT = """
import os, signal
from shapeshift.cli.stop_signals import stop_event

with stop_event() as stop:
    with stop._cond:
        os.kill(os.getpid(), signal.SIGTERM)
    print("stopped" if stop.wait(30) else "missed")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_sets_the_event(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)]
    threads = set(threading.enumerate())
    with stop_event() as stop:
        assert not stop.wait(0.05)
        os.kill(os.getpid(), number)
        assert stop.wait(120)
    after = [signal.getsignal(one) for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)]
    assert after == before
    assert set(threading.enumerate()) <= threads, "threads of earlier tests may have ended"
    assert signal.set_wakeup_fd(-1) == -1


def test_another_signal_does_not_stop() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with stop_event() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not stop.wait(0.2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_a_signal_while_the_lock_of_the_event_is_held() -> None:
    """`serve` stood still for ever where a second signal came while the handler of the first held this lock."""
    command = [sys.executable, "-c", INSIDE_THE_EVENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
