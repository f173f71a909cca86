"""Times on a clock of the test: those that are exported, in the unit that the name states, and deadlines of calls."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from shapeshift.serving import call_pool, responses
from shapeshift.serving.call_pool import CallPool, CallTimeoutError
from shapeshift.serving.metrics import RequestMetrics
from shapeshift.serving.responses import Responder
from tests.fakes import InferenceResponse, PbUtils, ResponseSender
from tests.waiting import wait_for


def test_latency_is_in_milliseconds_until_the_answer_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(responses, "time", SimpleNamespace(monotonic=lambda: now[0]))
    metrics = RequestMetrics("texts", 1, 0)
    responder = Responder(PbUtils(), metrics, pytest.fail)

    def make() -> InferenceResponse:
        now[0] += 0.170
        return InferenceResponse()

    responder.send(ResponseSender(), make, 99.920)
    responder.close()
    counts, total = metrics.latency_ms.totals()
    assert total == pytest.approx(250.0)
    bounds = [*metrics.latency_ms.bounds, float("inf")]
    assert [bound for bound, count in zip(bounds, counts, strict=True) if count][0] == 300


class WatchClock:
    """The clock of call pools. Time passes by `advance` alone, which waits until the watching thread has seen it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._naps = 0
        monkeypatch.setattr(call_pool, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        seen = self._naps
        wait_for(lambda: self._naps >= seen + 3)

    def _sleep(self, seconds: float) -> None:
        self._naps += 1
        time.sleep(0.001)


def test_a_freeze_moves_the_deadlines_of_calls_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that run and that wait; a pause of up to `standstill_s` moves none."""
    clock = WatchClock(monkeypatch)
    pool = CallPool("test-call", 1, standstill_s=1.0)
    release = threading.Event()
    running: list[object] = []
    waiting: list[object] = []
    pool.submit("a", lambda: release.wait(60), running.append, 1.2)
    pool.submit("a", lambda: release.wait(60), waiting.append, 2.0)
    wait_for(lambda: pool.running == pool.waiting == 1)
    clock.advance(0.0)
    # By 1.5 s: the deadlines are 2.7 and 3.5 s from now on.
    clock.advance(1.5)
    assert (pool.running, pool.waiting, running, waiting) == (1, 1, [], [])
    clock.advance(0.9)
    assert (running, waiting) == ([], [])
    clock.advance(0.9)
    (outcome,) = running
    assert isinstance(outcome, CallTimeoutError) and outcome.started
    assert waiting == [] and (pool.timeouts, pool.abandoned("a")) == (1, 1)
    # The watching thread rests once no call is left.
    clock.now += 0.9
    wait_for(lambda: waiting)
    assert len(waiting) == 1 and (pool.timeouts, pool.abandoned("a"), pool.running) == (2, 2, 0)
    release.set()
    wait_for(lambda: pool.abandoned() == 0)
    assert (len(running), len(waiting), pool.timeouts) == (1, 1, 2)
    pool.close()
