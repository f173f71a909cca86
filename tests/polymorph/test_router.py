"""The router over workers that answer: which worker gets a row, what is refused, what waits, and `close`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shapeshift.engines.execution.request import TextRequest
from shapeshift.errors import CancelledRequestError, OverloadedError
from shapeshift.serving.bounds import OVERTAKEN
from shapeshift.serving.metrics import Gauge, Gauges
from shapeshift.serving.traces import Tracer
from tests.serving.otlp import Receiver, traced_request
from tests.serving.otlp import receiver as receiver

if TYPE_CHECKING:
    from tests.polymorph.conftest import Router

MakeRouter = Callable[..., "Router"]
SHARED, DISPATCHED = (0, 0), (16, 64, 512)


@pytest.mark.parametrize("bins", [SHARED, DISPATCHED])
def test_every_text_gets_its_answer(make_router: MakeRouter, bins: tuple[int, ...]) -> None:
    router = make_router(*bins, queue_rows=10**4)
    rng = random.Random(1)
    asked = [router.ask(*(rng.randint(1, 512) for _ in range(rng.randint(1, 9)))) for _ in range(200)]
    assert [one.error() for one in asked] == [None] * 200
    router.check_rest()
    assert sorted(text for worker in router.workers.values() for text in worker.texts) == sorted(
        number for one in asked for number in one.numbers
    )


def test_a_text_goes_to_a_worker_that_is_long_enough(make_router: MakeRouter) -> None:
    router = make_router(*DISPATCHED)
    short, middle, long = (router.ask(length) for length in (16, 17, 65))
    assert [one.error() for one in (short, middle, long)] == [None] * 3
    assert long.numbers[0] in router.workers["c"].texts
    assert middle.numbers[0] not in router.workers["a"].texts


def test_at_most_two_calls_are_in_a_worker_and_the_rest_waits_here(
    make_router: MakeRouter, no_probes: Callable[[Router], None]
) -> None:
    router = make_router(0)
    no_probes(router)
    router.workers["a"].stick()
    asked = [router.ask(100) for _ in range(9)]
    router.wait(lambda: router.workers["a"].held >= 2 and router.waiting <= 7)
    assert router.workers["a"].held == 2 and router.waiting == 7 and router.running == 2
    router.workers["a"].free()
    assert [one.error() for one in asked] == [None] * 9
    router.check_rest()


@pytest.mark.parametrize("bins", [(0,), (512,)])
def test_urgent_texts_are_computed_before_a_burst_that_came_before(
    make_router: MakeRouter, no_probes: Callable[[Router], None], bins: tuple[int, ...]
) -> None:
    router = make_router(*bins)
    no_probes(router)
    router.workers["a"].stick()
    running = [router.ask(100) for _ in range(2)]
    router.wait(lambda: router.workers["a"].held == 2)
    burst = [router.ask(100, slo_class="batch") for _ in range(40)]
    urgent = [router.ask(100, slo_class="interactive") for _ in range(OVERTAKEN + 3)]
    router.workers["a"].free()
    assert [one.error() for one in (*running, *burst, *urgent)] == [None] * (len(burst) + len(urgent) + 2)
    classes = router.members.classes
    assert classes.started == [len(urgent), 2, len(burst)] and classes.waiting == [0, 0, 0]
    assert classes.overtakes == OVERTAKEN
    assert classes.waited_s[0] / len(urgent) < classes.waited_s[2] / len(burst)
    router.check_rest()


def test_a_deadline_is_held_against_what_goes_before_a_text_of_its_class(make_router: MakeRouter) -> None:
    router = make_router(512, queue_rows=10**6)
    router.workers["a"].stick()
    router.ask(*[1] * 20_000, slo_class="batch")
    with pytest.raises(OverloadedError, match="latency_ms: got 10000, an answer is predicted after"):
        router.ask(1, latency_ms=10_000, slo_class="batch")
    urgent = router.ask(1, latency_ms=10_000, slo_class="interactive")
    router.workers["a"].free()
    assert urgent.error() is None


def test_a_trace_shows_the_worker_its_bin_and_the_wait(make_router: MakeRouter, receiver: Receiver) -> None:
    router = make_router(64)
    router.workers["a"].stick()
    held = [router.ask(9) for _ in range(2)]
    router.wait(lambda: router.workers["a"].held == 2)
    tracer = Tracer("encode")
    ended = threading.Event()
    request = TextRequest([np.ones(tokens, np.int64) for tokens in (10, 20, 40)], lambda _: ended.set())
    request.trace = tracer.begin(traced_request())
    assert request.trace is not None
    router.submit(request)
    plain = router.ask(5)
    router.workers["a"].free()
    assert [one.error() for one in (*held, plain)] == [None] * 3 and ended.wait(60)
    request.trace.end({}, "OK")
    tracer.close()
    (span,) = receiver.named("encode")
    # The bin takes 64 tokens: the third text goes with the next call.
    first, second = receiver.named("engine call", worker="a", bin=64)
    assert [(one.parent, one.attributes["texts"], one.attributes["tokens"]) for one in (first, second)] == [
        (span.id, 2, 30),
        (span.id, 2, 45),
    ]
    for one in (first, second):
        assert one.attributes["predicted_ms"] == 1.0
        assert one.attributes["waited_ms"] == pytest.approx(1e3 * (one.began - span.began), abs=50)


def test_a_worker_of_an_older_build_takes_what_it_can(make_router: MakeRouter) -> None:
    router = make_router(48, 8, 0, wait=False)
    router.wait(lambda: router.joined("a", "c"))
    assert [one.error() for one in [router.ask(length) for length in (16, 17, 48, 512)]] == [None] * 4
    assert not router.workers["b"].texts
    assert router.lines.count("b: not used, its bin 8 is not one of this model's") == 1


def test_a_worker_with_one_bin_gets_nothing_from_a_shared_queue(make_router: MakeRouter) -> None:
    router = make_router(0, 0)
    router.workers["b"].restart(bin_edge=64)
    router.wait(lambda: router.joined("a"))
    assert [router.ask(length).error() for length in (3, 500)] == [None] * 2
    router.workers["b"].restart(bin_edge=0)
    router.wait(lambda: router.joined("a", "b"))


@pytest.mark.parametrize("bins", [SHARED, DISPATCHED])
def test_a_worker_joins_once_however_often_it_reports(make_router: MakeRouter, bins: tuple[int, ...]) -> None:
    router = make_router(*bins)
    for _ in range(20):
        assert router.ask(10, 10).error() is None
    router.check_rest()
    workers = router.members.workers.values()
    assert [worker.epoch for worker in workers] == [1] * len(bins)
    assert sum(": joined, " in line for line in router.lines) == len(bins)
    assert not any(": left, " in line for line in router.lines)


# Waiting and refusing.


def test_a_full_queue_refuses_and_an_empty_one_takes_any_request(make_router: MakeRouter) -> None:
    router = make_router(0, wait=False, queue_rows=3)
    router.workers["a"].ready = False
    router.wait(lambda: router.joined())
    large = router.ask(*[100] * 5)
    with pytest.raises(OverloadedError, match="5 rows wait, 1 more would exceed 3; retry later"):
        router.ask(1)
    router.workers["a"].restart()
    assert large.error() is None
    router.check_rest()
    router.workers["a"].ready = False
    router.wait(lambda: router.joined())
    waiting = router.ask(300)
    with pytest.raises(OverloadedError, match="1 rows wait, 3 more would exceed 3"):
        router.ask(1, 1, 1)
    also = router.ask(200, 1)
    router.workers["a"].restart()
    assert waiting.error() is None and also.error() is None
    router.check_rest()


def test_without_a_worker_texts_wait_and_fail_at_last(make_router: MakeRouter) -> None:
    router = make_router(16, 16, wait=False)
    served, lost = router.ask(10), router.ask(10, 65)
    assert served.error() is None
    router.wait(lambda: router.joined("a", "b") and router.waiting == 1)
    assert not lost.answered
    router.pace = replace(router.pace, no_worker_s=0.0)
    error = lost.error()
    assert isinstance(error, OverloadedError)
    assert str(error) == "no worker takes a text of 65 tokens; is the sidecar running?"
    router.check_rest()


def test_a_worker_that_joins_gets_the_orphans(make_router: MakeRouter) -> None:
    router = make_router(16, 16)
    long = router.ask(500)
    router.wait(lambda: router.waiting == 1)
    router.workers["b"].restart(bin_edge=512)
    assert long.error() is None
    router.check_rest()


def test_a_passed_deadline_is_reported_while_others_wait(make_router: MakeRouter) -> None:
    router = make_router(0)
    router.workers["a"].stick()
    running = [router.ask(100) for _ in range(2)]
    router.wait(lambda: router.workers["a"].held >= 2)
    patient, late = router.ask(100), router.ask(100, latency_ms=5)
    assert isinstance(late.error(), OverloadedError) and not patient.answered
    router.workers["a"].free()
    assert [one.error() for one in (*running, patient)] == [None] * 3
    assert late.numbers[0] not in router.workers["a"].texts
    router.check_rest()


def test_a_cancelled_request_is_not_computed(make_router: MakeRouter) -> None:
    router = make_router(0, wait=False)
    router.workers["a"].ready = False
    router.wait(lambda: router.joined())
    gone, stays = router.ask(100, 100), router.ask(100)
    gone._request.fail(CancelledRequestError("the caller cancelled the request"))
    router.workers["a"].restart()
    assert isinstance(gone.error(), CancelledRequestError) and stays.error() is None
    assert router.workers["a"].texts == stays.numbers
    router.check_rest()


# Candidates that come and go.


@pytest.mark.parametrize("bins", [SHARED, DISPATCHED])
def test_a_worker_that_is_offered_later_joins_and_a_former_one_keeps_its_call(
    make_router: MakeRouter, bins: tuple[int, ...]
) -> None:
    router = make_router(*bins)
    offered = router.transport.names
    offered.remove("b")
    router.wait(lambda: "b" not in router.members.workers)
    assert router.lines[-1] == "b: left, it is no longer offered"
    assert [router.ask(length).error() for length in (10, 300)] == [None] * 2
    offered.append("b")
    router.wait(lambda: router.joined(*router.workers))
    stays = [worker for name, worker in router.workers.items() if name != "b"]
    for worker in router.workers.values():
        worker.stick()
    asked = [router.ask(10, 60, 300) for _ in range(8)]
    router.wait(lambda: router.workers["b"].held >= 1)
    offered.remove("b")
    router.wait(lambda: "b" not in router.members.workers)
    for worker in stays:
        worker.free()
    router.wait(lambda: sum(one.answered for one in asked) >= 4)
    router.workers["b"].free()
    assert [one.error() for one in asked] == [None] * 8
    router.check_rest()


def test_the_gauges_of_a_former_worker_are_0(make_router: MakeRouter) -> None:
    router = make_router(0, 0)
    gauges = {metric.name: metric for metric in router.metrics() if isinstance(metric, Gauges)}
    timeouts = gauges["shapeshift_worker_timeouts"]
    router.members.workers["b"].timeouts = 7
    assert timeouts.read()["b"] == 7
    router.transport.names.remove("b")
    router.wait(lambda: "b" not in router.members.workers)
    assert timeouts.read() == {"a": 0, "b": 0}


# Closing.


def test_close_answers_everything_and_ends_every_thread(make_router: MakeRouter) -> None:
    before = set(threading.enumerate())
    router = make_router(0)
    worker = router.workers["a"]
    worker.stick()
    asked = [router.ask(100) for _ in range(6)]
    router.wait(lambda: worker.held >= 2)
    closing = threading.Thread(target=router.close)
    closing.start()
    # Waiting requests fail at once, while two calls run.
    router.wait(lambda: sum(one.answered for one in asked) >= 4)
    worker.free()
    closing.join(30)
    errors = [one.error() for one in asked]
    assert sum(error is None for error in errors) == len(worker.texts) <= 2
    assert all(isinstance(error, OverloadedError | None) for error in errors)
    with pytest.raises(OverloadedError, match="being unloaded"):
        router.ask(1)
    router.wait(lambda: set(threading.enumerate()) <= before)


def test_a_call_that_fails_during_close_is_answered(make_router: MakeRouter) -> None:
    router = make_router(0)
    worker = router.workers["a"]
    worker.stick()
    asked = router.ask(1)
    router.wait(lambda: router.running == 1 and worker.held >= 1)
    closing = threading.Thread(target=router.close)
    closing.start()
    router.wait(router._closing.is_set)
    worker.restart()
    assert isinstance(asked.error(), OverloadedError)
    closing.join(30)
    assert not closing.is_alive()


def test_close_answers_for_a_call_that_never_ends(make_router: MakeRouter) -> None:
    router = make_router(0)
    router.workers["a"].stick()
    asked = router.ask(1)
    router.wait(lambda: router.running == 1)
    router.close(timeout_s=0.05)
    assert isinstance(asked.error(), OverloadedError)


def test_metrics(make_router: MakeRouter) -> None:
    router = make_router(0, 0)
    asked = router.ask(*[100] * 3)
    assert asked.error() is None
    router.check_rest()

    def read() -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in router.metrics():
            name = metric.name.removeprefix("shapeshift_")
            if isinstance(metric, Gauges):
                found |= {f"{name}/{worker}": value for worker, value in metric.read().items()}
            else:
                found[name] = metric.read() if isinstance(metric, Gauge) else metric.value
        return found

    values = read()
    assert values["workers_joined"] == 2 and values["worker_rows_total"] == 3
    assert values["worker_calls_total"] >= 2
    assert values["retries_total"] == values["timeouts_total"] == 0
    for name in "ab":
        assert values[f"worker_outstanding/{name}"] == values[f"worker_timeouts/{name}"] == 0
    router.workers["a"].stick()
    router.workers["b"].stick()
    held = router.ask(100, 100)
    router.wait(lambda: router.running == 2)
    assert read()["worker_outstanding/a"] + read()["worker_outstanding/b"] == 2
    for name in "ab":
        router.workers[name].free()
    assert held.error() is None
