"""Requests that lose their slots before they finish, and continue later."""

from __future__ import annotations

import random

import pytest

from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import ABORT, Request
from tests.fused_decode.toy import Run, ToyRuntime, ids


class RandomPreemption(FirstComeFirstServed[Request]):
    """Preempts at random, each request at most twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(1000, 10**6)
        self._rng = rng
        self._running: list[Request] = []
        self.squashed: list[Request] = []

    def squash(self) -> list[Request]:
        chosen = [one for one in self._running if self._rng.random() < 0.1 and self.squashed.count(one) < 2]
        for request in chosen:
            self._running.remove(request)
            self.submit(request)
        self.squashed += chosen
        return chosen

    def admit(self, free: int) -> list[Request]:
        chosen = super().admit(free)
        self._running += chosen
        return chosen

    def finished(self, request: Request) -> None:
        self._running.remove(request)


@pytest.mark.parametrize("seed", range(4))
def test_a_preempted_request_gets_the_text_it_gets_alone(seed: int) -> None:
    rng = random.Random(seed)
    runtime = ToyRuntime(slots=4, max_length=48, seed=seed)
    run = Run(runtime, prefill_tokens=rng.choice((3, 64)))
    admission = run.loop.admission = RandomPreemption(rng)
    made = []
    for number in range(60):
        prompt, count = "abcdefghijkl"[: rng.randint(1, 12)], rng.randint(1, 30)
        made.append((run.submit(prompt, max_tokens=count, stream=number % 2 == 0), prompt, count))
        run.loop.step()
        run.loop.check_integrity()
    run.until_idle()
    assert len(admission.squashed) > 10
    assert len(run.finished) == len(made)
    for request, prompt, count in made:
        assert "".join(request.parts) == runtime.text(ids(prompt), count)
        assert request.generated == count
        assert all(span >= 0 for span in request.timings_ms().values())


def test_a_preempted_request_can_end() -> None:
    run = Run(ToyRuntime(slots=1))
    admission = run.loop.admission = RandomPreemption(random.Random(0))
    request, other = run.submit("abc", max_tokens=40), run.submit("abc", max_tokens=40)
    while not admission.squashed:
        run.loop.step()
    assert request.slot is None and not request.is_finished
    run.loop.end(request, ABORT)
    run.loop.step()
    assert request.finish_reason == ABORT
    run.until_idle()
    assert "".join(other.parts) == run.runtime.text(ids("abc"), 40)
