"""Bounds of queues."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from shapeshift.errors import OverloadedError
from shapeshift.serving.bounds import Bound, TimeBound


def test_a_refusal_names_parameter_value_and_limit() -> None:
    bound = Bound("queue_rows", 8, "rows")
    bound.require(5, 3)
    with pytest.raises(OverloadedError) as caught:
        bound.require(5, 4)
    assert str(caught.value) == "queue_rows: 5 rows wait, 4 more would exceed 8; retry later"


def test_an_empty_queue_takes_any_request() -> None:
    bound = Bound("queue_tokens", 8, "tokens")
    bound.require_unless_empty(0, 100)
    with pytest.raises(OverloadedError, match="^queue_tokens: 1 tokens wait, 100 more"):
        bound.require_unless_empty(1, 100)


def longest_admitted_ms(bound: TimeBound) -> int:
    """Of whole milliseconds, the longest prediction that the bound admits."""

    def admits(predicted_ms: int) -> bool:
        try:
            bound.require(predicted_ms)
        except OverloadedError:
            return False
        return True

    # What is admitted is all that is shorter.
    return bisect_left(range(5000), True, key=lambda ms: not admits(ms)) - 1


def test_a_prediction_is_taken_for_as_late_as_recent_ones_came_true() -> None:
    bound = TimeBound("max_queue_ms", 1000)
    # At first with a mean deviation of 0.03.
    assert longest_admitted_ms(bound) == 892
    for _ in range(300):
        bound.observe(600, 750)
    # All late alike: 1.25 times, and hardly a deviation.
    assert 795 <= longest_admitted_ms(bound) <= 800
    for _ in range(300):
        bound.observe(600, 660)
        bound.observe(600, 840)
    # As late in the mean, with a mean deviation of 0.15.
    assert longest_admitted_ms(bound) == pytest.approx(1000 / (1.25 + 4 * 0.15), abs=15)
    with pytest.raises(OverloadedError, match=r"predicted after 11\d\d ms, the limit is 1000 ms"):
        bound.require(600)


def test_answers_earlier_than_predicted_admit_no_more_than_the_limit() -> None:
    bound = TimeBound("max_queue_ms", 1000)
    for _ in range(300):
        bound.observe(800, 400)
    assert longest_admitted_ms(bound) == 1000


def test_a_short_wait_says_nothing_of_a_long_one() -> None:
    bound = TimeBound("max_queue_ms", 1000)
    at_first = longest_admitted_ms(bound)
    bound.observe(at_first // 2 - 1, 4990)
    assert longest_admitted_ms(bound) == at_first
    bound.observe(at_first // 2 + 1, 4990)
    assert longest_admitted_ms(bound) < at_first


def test_a_time_of_great_lateness_passes() -> None:
    """What is admitted after it is far below the limit, and must count all the same."""
    bound = TimeBound("max_queue_ms", 1000)
    for _ in range(300):
        bound.observe(1000, 60_000)
    assert (admitted := longest_admitted_ms(bound)) == 250
    for _ in range(300):
        bound.observe(admitted, admitted)
        admitted = longest_admitted_ms(bound)
    assert admitted == pytest.approx(1000, abs=10)


def test_without_a_limit_any_time_is_admitted() -> None:
    bound = TimeBound("max_queue_ms", 0)
    bound.observe(1, 100)
    bound.require(1e9)
