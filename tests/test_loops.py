"""Loops that go on: a round that fails is logged, counted, and followed by a longer pause."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from shapeshift.loops import Backoff, Failures, Loop, repeat
from tests.waiting import wait_for


def test_pauses_double_up_to_a_limit_and_begin_again() -> None:
    backoff = Backoff(first_s=1, max_s=5, healthy_s=60)
    assert [backoff.pause(2) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert [backoff.pause(61), backoff.pause(2)] == [1, 2]


def test_failures_are_counted_and_logged_ever_less_often() -> None:
    lines: list[str] = []
    failures = Failures(lines.append, "round")
    for _ in range(9):
        with failures.caught():
            raise ValueError("full")
    assert lines == [f"round failed, {number} in a row: ValueError('full')" for number in (1, 2, 4, 8)]
    with failures.caught():
        raise ValueError("gone")
    assert lines[-1] == "round failed, 10 in a row: ValueError('gone')"


def test_pauses_grow_while_rounds_fail_and_end_with_a_good_one() -> None:
    failures = Failures(lambda text: None, "round")
    pauses: list[float] = []
    for _ in range(7):
        with failures.caught():
            raise OSError
        pauses.append(failures.pause_s)
    assert pauses == [0.5, 1, 2, 4, 8, 10, 10]
    with failures.caught():
        pass
    assert (failures.in_a_row, failures.pause_s) == (0, 0)


def test_what_ends_the_process_is_not_caught() -> None:
    with pytest.raises(KeyboardInterrupt), Failures(lambda text: None, "round").caught():
        raise KeyboardInterrupt


def test_a_loop_goes_on_after_a_round_that_fails_until_it_is_stopped() -> None:
    rounds: list[int] = []
    lines: list[str] = []

    def step() -> float:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise ValueError("first")
        return 0.001

    loop = Loop("test", step, lines.append)
    loop.start()
    wait_for(lambda: len(rounds) > 3)
    loop.stop()
    count = len(rounds)
    assert loop.stopped.is_set() and lines == ["a round of test failed, 1 in a row: ValueError('first')"]
    assert "test" not in [thread.name for thread in threading.enumerate()] and len(rounds) == count


def test_rounds_on_an_event_loop_go_on_until_their_task_is_cancelled() -> None:
    rounds: list[int] = []
    lines: list[str] = []

    async def step() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise ValueError("first")

    async def run() -> int:
        task = asyncio.create_task(repeat("test", step, 0.001, lines.append))
        while len(rounds) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return len(rounds)

    count = asyncio.run(asyncio.wait_for(run(), 60))
    assert lines == ["a round of test failed, 1 in a row: ValueError('first')"] and len(rounds) == count


def test_a_loop_that_was_never_started_can_be_stopped() -> None:
    Loop("test", lambda: 0.0, lambda text: None).stop()
