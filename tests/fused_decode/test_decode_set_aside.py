"""Requests that give their slots back before they have ended, and go on later."""

from __future__ import annotations

import random

import pytest

from shapeshift.fused_decode.admission import FirstComeFirstServed
from shapeshift.fused_decode.sequence import ABORT, Sequence
from tests.fused_decode.toy import Run, ToyRuntime, ids


class Fickle(FirstComeFirstServed[Sequence]):
    """Takes slots back at random, each request's at most twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(1000, 10**6)
        self._rng = rng
        self._running: list[Sequence] = []
        self.squashed: list[Sequence] = []

    def squash(self) -> list[Sequence]:
        chosen = [one for one in self._running if self._rng.random() < 0.1 and self.squashed.count(one) < 2]
        for sequence in chosen:
            self._running.remove(sequence)
            self.submit(sequence)
        self.squashed += chosen
        return chosen

    def admit(self, free: int) -> list[Sequence]:
        chosen = super().admit(free)
        self._running += chosen
        return chosen

    def finished(self, request: Sequence) -> None:
        self._running.remove(request)


@pytest.mark.parametrize("seed", range(4))
def test_who_is_set_aside_says_what_it_says_alone(seed: int) -> None:
    rng = random.Random(seed)
    runtime = ToyRuntime(slots=4, max_length=48, seed=seed)
    run = Run(runtime, prefill_tokens=rng.choice((3, 64)), compaction=rng.random() < 0.7)
    fickle = run.loop.admission = Fickle(rng)
    made = []
    for number in range(60):
        prompt, count = "abcdefghijkl"[: rng.randint(1, 12)], rng.randint(1, 30)
        made.append((run.submit(prompt, max_tokens=count, stream=number % 2 == 0), prompt, count))
        run.loop.step()
        run.loop.check_integrity()
    run.until_idle()
    assert len(fickle.squashed) > 10
    assert len(run.ended) == len(made)
    for sequence, prompt, count in made:
        assert "".join(sequence.parts) == runtime.text(ids(prompt), count)
        assert sequence.generated == count
        assert all(span >= 0 for span in sequence.timings_ms().values())


def test_who_is_set_aside_may_leave_for_good() -> None:
    run = Run(ToyRuntime(slots=1))
    fickle = run.loop.admission = Fickle(random.Random(0))
    sequence, other = run.submit("abc", max_tokens=40), run.submit("abc", max_tokens=40)
    while not fickle.squashed:
        run.loop.step()
    assert sequence.slot is None and not sequence.ended
    run.loop.end(sequence, ABORT)
    run.loop.step()
    assert sequence.finish == ABORT
    run.until_idle()
    assert "".join(other.parts) == run.runtime.text(ids("abc"), 40)
