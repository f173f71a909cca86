"""Real processes that end, with and without descriptors of the kernel."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shapeshift.triton.embedded.process_tracker import ProcessState, ProcessTracker
from tests.sidecar.stubs import Stubs

# Longer than any test: a wait that times out fails the test by its result.
LONG_S = 60.0


def descriptors() -> int:
    """Descriptors of processes that this process holds."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        # Threads of other tests open and close theirs meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found += "pidfd" in str(path.readlink())
    return found


@pytest.fixture
def tracker() -> Iterator[ProcessTracker]:
    before = descriptors()
    made = ProcessTracker(local=True)
    yield made
    made.keep_only([])
    assert descriptors() == before


def test_an_end_is_noticed_while_waiting(stubs: Stubs, tracker: ProcessTracker) -> None:
    ends, stays = stubs.start("a_0_0"), stubs.start("b_0_0")
    before = descriptors()
    tracker.remember([ends.pid, stays.pid])
    assert descriptors() == before + 2
    assert tracker.wait_ended(0.0) == frozenset()
    killer = threading.Timer(0.05, ends.kill)
    killer.start()
    assert tracker.wait_ended(LONG_S) == {ends.pid}
    killer.join()
    # Each end is told once.
    assert tracker.wait_ended(0.0) == frozenset()
    assert tracker.state(ends.pid) is ProcessState.ENDED
    assert tracker.state(stays.pid) is ProcessState.ALIVE
    stays.kill()
    assert tracker.wait_ended(LONG_S) == {stays.pid}


@pytest.mark.parametrize("is_known", [True, False])
def test_a_process_that_a_signal_has_stopped_is_suspended(
    stubs: Stubs, tracker: ProcessTracker, is_known: bool
) -> None:
    process = stubs.start("a_0_0")
    if is_known:
        tracker.remember([process.pid])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert tracker.state(process.pid) is ProcessState.SUSPENDED
    assert tracker.wait_ended(0.0) == frozenset()
    process.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
    assert tracker.state(process.pid) is ProcessState.ALIVE


def test_a_wait_is_as_long_as_stated(tracker: ProcessTracker) -> None:
    """The kernel takes milliseconds; a time that is over already is none."""
    start = time.monotonic()
    assert tracker.wait_ended(0.05) == frozenset()
    assert time.monotonic() - start >= 0.05
    assert tracker.wait_ended(-1.0) == frozenset()


def test_a_process_that_another_has_replaced_is_not_told(stubs: Stubs, tracker: ProcessTracker) -> None:
    old = stubs.start("a_0_0")
    tracker.remember([old.pid])
    new = stubs.start("a_0_0")
    old.kill()
    old.wait()
    assert tracker.wait_ended(0.0) == frozenset()
    tracker.remember([new.pid])
    new.kill()
    assert tracker.wait_ended(LONG_S) == {new.pid}


def test_a_forgotten_process_is_not_told(stubs: Stubs, tracker: ProcessTracker) -> None:
    process = stubs.start("a_0_0")
    tracker.remember([process.pid])
    tracker.keep_only([])
    process.kill()
    process.wait()
    assert tracker.wait_ended(0.0) == frozenset()


def test_wake_ends_the_wait(tracker: ProcessTracker) -> None:
    waker = threading.Timer(0.05, tracker.wake)
    waker.start()
    assert tracker.wait_ended(LONG_S) == frozenset()
    assert tracker.wait_ended(LONG_S) == frozenset()
    waker.join()


def test_other_programs_are_not_watched(tracker: ProcessTracker) -> None:
    tracker.remember([os.getpid()])
    assert tracker.state(os.getpid()) is ProcessState.ABSENT


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_without_descriptors_the_state_is_still_known(
    stubs: Stubs, tracker: ProcessTracker, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = stubs.start("a_0_0")
    tracker.remember([process.pid])
    assert tracker.state(process.pid) is ProcessState.ALIVE
    process.kill()
    process.wait()
    assert tracker.wait_ended(0.0) == frozenset()
    assert tracker.state(process.pid) is ProcessState.ENDED
