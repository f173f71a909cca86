"""One worker as the router sees it: when it is asked, how long a call may take, and what its reports say."""

from __future__ import annotations

import math

import pytest

from shapeshift.polymorph.router.membership import (
    _MAX_PROBE_S,
    _MOST_DOUBLINGS,
    _RECENT_S,
    PACE,
    WorkerCall,
    WorkerState,
)
from shapeshift.polymorph.router.transport import WorkerInfo


def call(expected_ms: float = 10.0, began: float = 100.0) -> WorkerCall:
    return WorkerCall((), expected_ms, 0, began)


def info(busy_ms: float, call_ms: float = 0.0, pid: int = 7) -> WorkerInfo:
    return WorkerInfo(0, 0, pid, round(call_ms * 1e3), round(busy_ms * 1e3))


@pytest.mark.parametrize(
    ("joined", "absent_s", "pause_s"),
    [
        (True, 0.0, PACE.max_pause_s),
        (False, 0.0, PACE.min_pause_s),
        (False, 1.0, PACE.min_pause_s),
        (False, 8.0, 0.4),
        (False, 1000.0, PACE.max_pause_s),
        (False, math.inf, PACE.max_pause_s),
    ],
)
def test_a_worker_is_asked_more_rarely_the_longer_it_has_left(joined: bool, absent_s: float, pause_s: float) -> None:
    # `last_contact` is 0, so that the present moment is the time since then.
    for now, silent in ((pause_s * 0.99, False), (pause_s * 1.01, True)):
        assert WorkerState("w", joined=joined, left_at=now - absent_s).is_silent(now) is silent


def test_a_worker_is_not_asked_at_the_moment_of_its_pause_nor_while_a_call_is_in_flight() -> None:
    worker = WorkerState("w", joined=True)
    assert not worker.is_silent(PACE.max_pause_s)
    worker.calls.append(call())
    assert not worker.is_silent(1000.0)


def test_the_second_call_counts_from_the_end_of_the_first() -> None:
    worker = WorkerState("w")
    first, second = call(began=100.0), call(began=100.25)
    worker.calls += [first, second]
    assert worker.end(first, 100.5) == 500.0
    assert (worker.calls, worker.last_end) == ([second], 100.5)
    assert worker.end(second, 100.75) == 250.0
    assert (worker.calls, worker.last_end) == ([], 100.75)


def test_of_two_calls_alike_the_one_that_ended_is_removed() -> None:
    worker = WorkerState("w")
    worker.calls += [call(), call()]
    first, second = worker.calls
    worker.end(second, 101.0)
    assert worker.calls[0] is first


def test_what_is_expected_is_the_sum_of_the_calls_in_flight() -> None:
    worker = WorkerState("w")
    assert worker.expected_ms() == 0.0
    worker.calls += [call(10.0), call(2.5)]
    assert worker.expected_ms() == 12.5


@pytest.mark.parametrize(
    ("late", "least_s"), [(0, 1), (1, 2), (3, 8), (_MOST_DOUBLINGS, 2**_MOST_DOUBLINGS), (9, 2**_MOST_DOUBLINGS)]
)
def test_a_worker_that_was_late_gets_twice_the_time_up_to_a_bound(late: int, least_s: int) -> None:
    assert WorkerState("w", joined=True, late=late).time_limit_s(0.0, 100.0) == PACE.least_limit_s * least_s


@pytest.mark.parametrize(
    ("absent_s", "limit_s"),
    [(0.0, PACE.least_limit_s), (1.0, PACE.least_limit_s), (4.0, 0.6), (100.0, _MAX_PROBE_S), (math.inf, _MAX_PROBE_S)],
)
def test_a_worker_that_has_left_gets_a_share_of_its_absence(absent_s: float, limit_s: float) -> None:
    worker = WorkerState("w", left_at=100.0 - absent_s, late=3)
    assert worker.time_limit_s(0.0, 100.0) == pytest.approx(limit_s)


def test_a_long_call_gets_five_times_what_is_expected() -> None:
    worker = WorkerState("w", joined=True, delay_ms=30.0)
    worker.calls.append(call(50.0))
    assert worker.time_limit_s(20.0, 100.0) == pytest.approx(5 * (50 + 20 + 30) / 1e3)


def test_reports_are_weighed_by_the_time_between_them() -> None:
    worker = WorkerState("w", reported_at=100.0)
    worker.report(info(1000.0, call_ms=20.0), 60.0, 100.0 + _RECENT_S)
    weight = 1 - math.exp(-1)
    assert worker.delay_ms == pytest.approx(weight * 40.0)
    # A first report says nothing of other fronts: what the process did before is not known.
    assert (worker.foreign_share, worker.reported_at) == (0.0, 100.0 + _RECENT_S)
    # In the next half second the worker was busy for 300 ms, 50 of them with this front's call.
    worker.report(info(1300.0, call_ms=50.0), 50.0, 100.0 + 2 * _RECENT_S)
    assert worker.delay_ms == pytest.approx(weight * 40.0 * (1 - weight))
    assert worker.foreign_share == pytest.approx(weight * 0.25 / _RECENT_S)


def test_a_call_that_took_less_here_than_there_is_no_negative_delay() -> None:
    worker = WorkerState("w", reported_at=100.0)
    worker.report(info(10.0, call_ms=20.0), 10.0, 101.0)
    assert worker.delay_ms == 0.0


@pytest.mark.parametrize(("busy_ms", "share"), [(500.0, 0.0), (9000.0, 1.0)])
def test_a_share_is_from_none_to_all_of_the_time(busy_ms: float, share: float) -> None:
    worker = WorkerState("w", info=info(1000.0), reported_at=100.0)
    worker.report(info(busy_ms), 0.0, 101.0)
    assert worker.foreign_share == pytest.approx((1 - math.exp(-1 / _RECENT_S)) * share)


def test_another_process_begins_anew_to_count() -> None:
    worker = WorkerState("w", info=info(1000.0, pid=7), reported_at=100.0)
    worker.report(info(9000.0, pid=8), 0.0, 101.0)
    assert worker.foreign_share == 0.0 and worker.info == info(9000.0, pid=8)


def test_two_reports_of_one_moment_are_no_share_of_it() -> None:
    worker = WorkerState("w", info=info(1000.0), reported_at=100.0)
    worker.report(info(2000.0), 5.0, 100.0)
    assert (worker.foreign_share, worker.delay_ms) == (0.0, 0.0)


def test_a_new_worker_has_not_joined_and_nothing_is_held_against_it() -> None:
    made = WorkerState("w")
    assert not made.joined and not made.probe_due and made.calls == []
    assert (made.timeouts, made.failures, made.late, made.epoch, made.left_at) == (0, 0, 0, 0, -math.inf)
