"""Waits are bounded in time: predictions by the profile, in milliseconds, and what is refused on arrival by them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shapeshift.engines.execution import executor as executor_module
from shapeshift.engines.execution.request import Row, TextRequest
from shapeshift.errors import InvalidInputError, OverloadedError
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.router import membership as membership_module
from shapeshift.polymorph.router.assignment import SharedQueue
from shapeshift.polymorph.router.membership import Membership, WorkerCall, WorkerState
from shapeshift.polymorph.router.transport import WorkerInfo
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.serving.bounds import SloClasses, TimeBound
from shapeshift.serving.call_pool import CallTimeoutError
from tests.fakes import PbUtils, Request, TritonError, logger, text_request
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.polymorph.conftest import Gate, Router

MakeFront = Callable[..., TextFront]
MakeRouter = Callable[..., "Router"]


@pytest.fixture
def busy_front(make_front: MakeFront, gate: Gate) -> Callable[..., tuple[TextFront, list[Request]]]:
    """A function that makes a front of two engine threads, both held in calls of 40 ms by the profile; one text waits.

    Every text costs 40 ms. Returns the front and these three requests.
    """

    def make(**parameters: object) -> tuple[TextFront, list[Request]]:
        front = make_front(packing=False, engine_threads=2, latency_ms=(40.0, 40.0), **parameters)
        executor = front.executor
        assert isinstance(executor, executor_module.EngineExecutor) and executor.wait_loaded(30)
        gate.hold()
        requests = [text_request("a") for _ in range(3)]
        for request in requests[:2]:
            front.execute([request])
            gate.wait_held()
        front.execute(requests[2:])
        return front, requests

    return make


@pytest.mark.parametrize(("count", "each_ms"), [(64, 800.0), (1000, 50.0)])
def test_an_ordinary_burst_waits_on_a_slow_machine_and_one_without_end_is_refused(
    make_front: MakeFront, gate: Gate, count: int, each_ms: float
) -> None:
    """Texts of 400 words, and short ones, where a core takes so long for one; with the default bounds."""
    front = make_front(packing=False, engine_threads=2, latency_ms=(each_ms, each_ms))
    executor = front.executor
    assert isinstance(executor, executor_module.EngineExecutor) and executor.wait_loaded(30)
    gate.hold()
    front.execute([text_request("a") for _ in range(count)])
    assert executor.waiting + executor.running == count
    further = [text_request("a") for _ in range(count)]
    front.execute(further)
    code, text = further[-1].refusal()
    assert code == TritonError.UNAVAILABLE and "the limit is 30000 ms; retry later" in text


def test_a_request_that_would_wait_too_long_is_refused_on_arrival(
    busy_front: Callable[..., tuple[TextFront, list[Request]]], gate: Gate
) -> None:
    front, served = busy_front(max_queue_ms=113)
    # 40 ms wait and 80 ms run, on two threads; then 40 ms of its own. The bound takes the first answers for 12% late.
    last, refused = text_request("a"), text_request("a")
    front.execute([last, refused])
    limit = "max_queue_ms: an answer is predicted after 134 ms, the limit is 113 ms; retry later"
    assert refused.refusal() == (TritonError.UNAVAILABLE, limit)
    gate.release()
    for request in (*served, last):
        request.vectors()


def test_late_answers_make_the_next_ones_be_refused_earlier(
    busy_front: Callable[..., tuple[TextFront, list[Request]]], gate: Gate
) -> None:
    front, served = busy_front(max_queue_ms=130)
    front.execute([last := text_request("a")])
    # It was predicted after 100 ms. Of a ratio above 4 counts 4, and one answer moves the means by a 32nd.
    time.sleep(0.6)
    gate.release()
    for request in (*served, last):
        request.vectors()
    executor = front.executor
    assert isinstance(executor, executor_module.EngineExecutor)
    with pytest.raises(OverloadedError, match="max_queue_ms: an answer is predicted after 158 ms"):
        executor.time_bound.require(100)


def test_rows_of_one_request_share_the_threads(
    busy_front: Callable[..., tuple[TextFront, list[Request]]], gate: Gate
) -> None:
    front, served = busy_front(max_queue_ms=156)
    four, refused = text_request(*"abcd"), text_request(*"abcd")
    front.execute([refused])
    assert "predicted after 157 ms, the limit is 156 ms" in refused.refusal()[1]
    front.execute([four := text_request(*"abc")])
    gate.release()
    assert len(four.vectors()) == 3
    for request in served:
        request.vectors()


def test_texts_are_not_read_where_the_queue_alone_takes_too_long(
    busy_front: Callable[..., tuple[TextFront, list[Request]]], gate: Gate
) -> None:
    front, served = busy_front(max_queue_ms=90)
    # The queue takes 60 ms, counted as 67; a deadline is held against the prediction as it is.
    lengths = front.request_metrics.lengths
    read = lengths.totals()[0][-1]
    hurried, own = text_request("hurried", parameters={"latency_ms": 59}), text_request("own cost")
    front.execute([hurried, own])
    assert "latency_ms: got 59, an answer is predicted after 60 ms" in hurried.refusal()[1]
    assert "max_queue_ms: an answer is predicted after 112 ms" in own.refusal()[1]
    front.execute([fits := text_request("fits", parameters={"latency_ms": 61})])
    assert "latency_ms: got 61, an answer is predicted after 100 ms" in fits.refusal()[1]
    executor = front.executor
    assert isinstance(executor, executor_module.EngineExecutor)
    executor.time_bound = TimeBound("max_queue_ms", 66)
    front.execute([late := text_request("late")])
    assert "max_queue_ms: an answer is predicted after 67 ms, the limit is 66 ms" in late.refusal()[1]
    assert lengths.totals()[0][-1] - read == 2, "of two texts: hurried and late were not read"
    gate.release()
    for request in served:
        request.vectors()


def test_a_deadline_that_cannot_be_met_is_refused_on_arrival(
    busy_front: Callable[..., tuple[TextFront, list[Request]]], gate: Gate
) -> None:
    front, served = busy_front(max_queue_ms=0)
    early, patient = (text_request("a", parameters={"latency_ms": own}) for own in (99, 60_000))
    front.execute([early, patient])
    assert early.refusal() == (
        TritonError.UNAVAILABLE,
        "latency_ms: got 99, an answer is predicted after 100 ms; retry later or elsewhere",
    )
    others = [text_request("a") for _ in range(50)]
    front.execute(others)
    gate.release()
    for request in (*served, patient, *others):
        request.vectors()


def test_an_empty_queue_takes_any_request(make_front: MakeFront, gate: Gate) -> None:
    """By a profile that is wrong, a front that refused would never find out."""
    front = make_front(packing=False, engine_threads=1, latency_ms=(40.0, 40.0), max_queue_ms=10)
    gate.hold()
    running, waiting = text_request("a"), text_request("a", "b", parameters={"latency_ms": 30_000})
    front.execute([running])
    gate.wait_held()
    front.execute([waiting])
    gate.release()
    running.vectors()
    waiting.vectors()


def test_a_waiting_text_of_an_urgent_class_goes_first(make_front: MakeFront, gate: Gate, pb_utils: PbUtils) -> None:
    front = make_front(packing=False, engine_threads=1)
    gate.hold()
    running = text_request("a")
    front.execute([running])
    gate.wait_held()
    waiting = [text_request("b", parameters={"slo_class": name}) for name in ("batch", "other", "interactive")]
    front.execute(waiting)
    gate.release()
    for request in (running, *waiting):
        request.vectors()
    front.close()
    assert pb_utils.metric("shapeshift_overtakes_total") == 2


def test_predictions_follow_what_calls_take(make_front: MakeFront, gate: Gate) -> None:
    front = make_front(packing=False, engine_threads=1, latency_ms=(40.0, 40.0))
    executor = front.executor
    assert isinstance(executor, executor_module.EngineExecutor) and executor.wait_loaded(30)
    text = TextRequest([np.ones(4, np.int64)], lambda request: None)
    assert executor.predicted_ms(text.rows) == pytest.approx(40.0)
    finished: list[TextRequest] = []
    gate.hold()
    executor.submit(TextRequest([np.ones(4, np.int64)], finished.append))
    time.sleep(0.2)
    gate.release()
    wait_for(lambda: executor.threads[0].busy_ms == 0 and finished)
    assert finished[0].engine_ms > 80
    # More than twice the profile, of which twice counts, once: a tenth of the way.
    assert executor.predicted_ms(text.rows) == pytest.approx(44.0)


def test_settings() -> None:
    with pytest.raises(InvalidInputError, match="max_queue_ms: got -1"):
        PolymorphSettings(max_queue_ms=-1)


# With workers.


@pytest.mark.parametrize("bins", [(0,), (64,)])
def test_a_router_refuses_what_would_wait_too_long(
    make_router: MakeRouter, no_probes: Callable[[Router], None], bins: tuple[int, ...]
) -> None:
    router = make_router(*bins, max_queue_ms=3.5)
    no_probes(router)
    router.workers["a"].stick()
    # Two calls of 1 ms are in the worker.
    asked = [router.ask(60) for _ in range(2)]
    router.wait(lambda: router.workers["a"].held == 2 or router.running == 2)
    asked.append(router.ask(60))
    router.wait(lambda: router.waiting == 1)
    with pytest.raises(OverloadedError, match="max_queue_ms: an answer is predicted after 4 ms, the limit is 3.5 ms"):
        router.ask(60)
    with pytest.raises(OverloadedError, match="latency_ms: got 2, an answer is predicted after 4 ms"):
        router.ask(60, latency_ms=2)
    router.workers["a"].free()
    assert [one.error() for one in asked] == [None] * 3
    router.check_rest()


def test_a_router_learns_how_late_its_answers_come(
    make_router: MakeRouter, no_probes: Callable[[Router], None]
) -> None:
    router = make_router(0, max_queue_ms=5)
    no_probes(router)
    router.workers["a"].stick()
    asked = [router.ask(60) for _ in range(2)]
    router.wait(lambda: router.workers["a"].held == 2 or router.running == 2)
    asked += [router.ask(60) for _ in range(2)]
    # The last one is predicted after some milliseconds, and held for several times as long.
    time.sleep(0.05)
    router.workers["a"].free()
    assert [one.error() for one in asked] == [None] * 4
    with pytest.raises(OverloadedError, match="max_queue_ms"):
        router.time_bound.require(4)


def one_worker(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> Membership:
    """The members of a router, the worker a alone, with a clock that shows now[0]."""
    monkeypatch.setattr(membership_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    members = Membership(SharedQueue(lambda edge: (100, 4), lambda edge, tokens: 10.0, SloClasses()), 9, logger())
    members.offer(["a"])
    return members


def test_a_router_corrects_the_profile_by_how_long_workers_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    members = one_worker(monkeypatch, now)
    worker = members.workers["a"]
    rows = TextRequest([np.ones(4, np.int64)], lambda request: None).rows
    calls = [WorkerCall(rows, 20.0, worker.epoch, now[0]) for _ in range(2)]
    worker.calls += calls
    assert members.predicted_ms(rows, lambda row: 10.0) == pytest.approx(10.0)
    # Each takes 30 ms; the second waits in the worker for the first.
    for call in calls:
        now[0] += 0.030
        members.ended(worker, call, WorkerInfo(0, 0, 1))
    factor = 1 + 0.1 * 0.5
    factor += 0.1 * (1.5 - factor)
    assert members.predicted_ms(rows, lambda row: 10.0) == pytest.approx(10.0 * factor)


def test_rows_that_a_worker_leaves_to_a_better_one_do_not_wait_for_a_probe() -> None:
    queue = SharedQueue(lambda edge: (100, 4), lambda edge, tokens: 10.0, SloClasses())
    members = Membership(queue, 9, logger())
    members.offer(["a", "b"])
    for worker in members.workers.values():
        hello = WorkerCall([], 0.0, worker.epoch, time.monotonic())
        worker.calls.append(hello)
        members.ended(worker, hello, WorkerInfo(0, 0, 1))
    queue.delayed("b", 1e6)
    rows = TextRequest([np.ones(4, np.int64)] * 2, lambda request: None).rows
    members.put(rows[:1])
    taken = {worker.name: members.take(worker) for worker in iter(members.next_ready, None)}
    assert taken == {"a": rows[:1], "b": []}
    members.put(rows[1:])
    queue.delayed("b", 0.0)
    taken = {worker.name: members.take(worker) for worker in iter(members.next_ready, None)}
    assert taken == {"a": [], "b": rows[1:]}


def test_a_call_gets_five_times_its_profiled_time() -> None:
    """And that of the calls before it; at least the least time-out."""
    worker, limits = WorkerState("w", joined=True), []
    for service_ms in (1.0, 100.0, 100.0):
        limits.append(worker.time_limit_s(service_ms, 7.0))
        worker.calls.append(WorkerCall([], service_ms, 0, 7.0))
    # 5 x 1 ms is less than the least; 5 x (1 + 100) ms; 5 x (1 + 100 + 100) ms.
    assert limits == pytest.approx([0.25, 0.505, 1.005])
    worker.calls.clear()
    # Other fronts' calls come first.
    worker.delay_ms = 30.0
    assert worker.time_limit_s(100.0, 7.0) == pytest.approx(0.65)


def test_the_longer_a_worker_has_left_the_less_often_it_is_probed_and_the_more_time_it_gets() -> None:
    worker = WorkerState("w", joined=True, last_contact=100.0)
    assert not worker.is_silent(100.8) and worker.is_silent(101.0)
    assert worker.time_limit_s(0.0, 100.0) == pytest.approx(0.25)
    worker.late = 2
    assert worker.time_limit_s(0.0, 100.0) == pytest.approx(1.0)
    worker.late = 9
    assert worker.time_limit_s(0.0, 100.0) == pytest.approx(2.0)
    worker.joined, worker.left_at = False, 100.0
    for now_s, pause_s, limit_s in ((100.5, 0.1, 0.25), (102.0, 0.1, 0.3), (110.0, 0.5, 1.5), (200.0, 0.9, 10.0)):
        worker.last_contact = now_s - pause_s
        assert not worker.is_silent(now_s - 0.01) and worker.is_silent(now_s + 0.01)
        assert worker.time_limit_s(0.0, now_s) == pytest.approx(limit_s)
    # One that has never joined.
    worker = WorkerState("w", last_contact=100.0)
    assert not worker.is_silent(100.8) and worker.is_silent(101.0)


def test_a_probe_that_is_late_soon_after_a_worker_left_is_no_second_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a row let the sidecar replace the worker: it may be slow only."""
    now = [100.0]
    members = one_worker(monkeypatch, now)
    worker = members.workers["a"]

    def end(rows: Sequence[Row], outcome: WorkerInfo | Exception) -> int:
        call = WorkerCall(rows, 0.0, worker.epoch, now[0])
        worker.calls.append(call)
        members.ended(worker, call, outcome)
        return worker.timeouts

    late = CallTimeoutError("late", started=True)
    end([], WorkerInfo(0, 0, 1))
    rows = TextRequest([np.ones(4, np.int64)], lambda request: None).rows
    members.put(rows)
    assert end(members.take(worker), late) == 1 and not worker.joined
    now[0] += 0.5
    assert end([], late) == 1
    now[0] += 4.0
    assert end([], late) == 2
    # What a row waited for in vain is not forgotten with the answer to a probe.
    end([], WorkerInfo(0, 1, 2))
    assert worker.joined and worker.late == 1
    members.retry(rows)
    end(members.take(worker), WorkerInfo(0, 1, 2))
    assert worker.late == 0


def test_what_other_fronts_take_of_a_worker_is_seen_in_its_reports() -> None:
    worker = WorkerState("w")
    worker.report(WorkerInfo(0, 0, 1, call_us=2000, busy_us=2000), took_ms=2.5, now=100.0)
    assert worker.delay_ms == pytest.approx(0.5) and worker.foreign_share == 0
    for step in range(1, 60):
        # Every 100 ms a call of 2 ms, before which 5 ms of another front's come, of 30 ms that those take.
        info = WorkerInfo(0, 0, 1, call_us=2000, busy_us=2000 + step * 32_000)
        worker.report(info, took_ms=7.5, now=100.0 + step * 0.1)
    assert worker.delay_ms == pytest.approx(5.5, rel=0.01) and worker.foreign_share == pytest.approx(0.3, rel=0.01)
    # A new process begins at 0.
    worker.report(WorkerInfo(0, 1, 2, call_us=2000, busy_us=2000), took_ms=2.5, now=106.0)
    assert worker.foreign_share == pytest.approx(0.3, rel=0.01)
    # After a pause what was before counts for little.
    worker.report(WorkerInfo(0, 1, 2, call_us=2000, busy_us=4000), took_ms=2.5, now=109.0)
    assert worker.delay_ms == pytest.approx(0.5, abs=0.05) and worker.foreign_share < 0.01


def test_the_time_of_a_worker_is_in_milliseconds(make_router: MakeRouter) -> None:
    router = make_router(0)
    router.workers["a"].before = lambda texts: time.sleep(0.03)
    finished: list[TextRequest] = []
    router.submit(TextRequest([np.ones(4, np.int64)], finished.append))
    router.wait(lambda: bool(finished))
    assert 30 <= finished[0].engine_ms < 30_000
    router.check_rest()
