"""The profile of image engines: what a batch takes when nothing else runs, measured where something does."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from shapeshift.build_engines.image.engines import latencies
from shapeshift.engines.profile import idle_ms


def call(processor_ms: float, waits_ms: float = 0.0) -> Callable[[], None]:
    """Takes so much processor time, and waits for so long, as it does for a processor that others use."""

    def run() -> None:
        end = time.thread_time() + processor_ms / 1e3
        while time.thread_time() < end:
            pass
        time.sleep(waits_ms / 1e3)

    return run


def best(calls: dict[int, Callable[[], None]], on_cpu: bool = True) -> dict[int, float]:
    profile = latencies({gamma: {1: one} for gamma, one in calls.items()}, 0.0, on_cpu)
    return {gamma: point.best_ms for gamma, (point,) in profile.items()}


def test_a_gamma_that_had_to_wait_in_every_round_is_still_the_faster_one() -> None:
    slowed = {-20: call(5.0, waits_ms=60.0), 0: call(20.0)}
    profile = best(slowed)
    assert profile[-20] < profile[0]
    assert best(slowed, on_cpu=False)[-20] > 60.0, "a GPU's time is that on the clock"


def test_what_other_programs_add_to_the_clock_does_not_count() -> None:
    processor = np.array([[10.0, 10.0, 10.0], [20.0, 20.0, 20.0]])
    on_two_cores = processor / 2
    assert idle_ms(on_two_cores, processor).tolist() == [5.0, 10.0]
    once_free = on_two_cores + [[0.0, 9.0, 30.0], [70.0, 0.0, 5.0]]
    assert idle_ms(once_free, processor).tolist() == [5.0, 10.0]
    never_free = on_two_cores + [[0.0, 0.0, 0.0], [70.0, 80.0, 90.0]]
    assert idle_ms(never_free, processor) == pytest.approx([5.0, 13.0])


def test_calls_that_use_fewer_cores_take_longer_for_the_same_processor_time() -> None:
    processor = np.array([[10.0] * 3, [10.0] * 3])
    assert idle_ms(np.array([[5.0] * 3, [6.0] * 3]), processor).tolist() == [5.0, 6.0]


def test_fewer_tokens_are_never_slower_but_merging_takes_time() -> None:
    profile = best({-20: call(12.0), -5: call(6.0), 0: call(1.0), 2: call(9.0), 4: call(3.0)}, on_cpu=False)
    assert profile[-20] <= profile[-5] and profile[0] <= profile[2] <= profile[4]
    assert profile[-5] > profile[0]


def test_each_batch_has_its_own_point() -> None:
    profile = latencies({0: {1: call(1.0), 4: call(8.0)}}, 0.0, on_cpu=True)
    assert [point.images for point in profile[0]] == [1, 4]
    assert profile[0][0].best_ms < profile[0][1].best_ms
    assert all(point.median_ms <= point.p99_ms for point in profile[0])
