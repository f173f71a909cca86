"""Requests that lose their slots before they finish, and continue later."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shapeshift.fused_decode.policy.admission import FirstComeFirstServed, always, nothing
from shapeshift.fused_decode.request import ABORT, Request
from tests.fused_decode.toy import LETTERS, Run, ToyRuntime, drive_at_random, ids
from tests.recording import recording
from tests.sampling import few


class RandomPreemption(FirstComeFirstServed[Request]):
    """Preempts at random, each request at most twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(1000, ("interactive", "*"))
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

    def admit(
        self, free: int, fits: Callable[[Request], bool] = always, shared: Callable[[Request], int] = nothing
    ) -> list[Request]:
        chosen = super().admit(free, fits, shared)
        self._running += chosen
        return chosen

    def finished(self, request: Request) -> None:
        self._running.remove(request)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", few(range(4), (0, 2)))
def test_a_preempted_request_gets_the_text_it_gets_alone(seed: int, ahead: bool) -> None:
    rng = random.Random(seed)
    runtime, admission = ToyRuntime(slots=4, max_length=48, seed=seed, ahead=ahead), RandomPreemption(rng)
    run = Run(runtime, prefill_tokens=rng.choice((3, 64)), admission=admission)
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
    admission = RandomPreemption(random.Random(0))
    run = Run(ToyRuntime(slots=1), admission=admission)
    request = run.submit("abc", max_tokens=40)
    run.loop.step()
    # It takes the slot, which would be given back otherwise.
    other = run.request("abc", max_tokens=40)
    other.slo_class = "interactive"
    run.loop.submit(other)
    while not admission.squashed:
        run.loop.step()
    assert request.slot is None and not request.is_finished
    run.loop.end(request, ABORT)
    run.loop.step()
    assert request.finish_reason == ABORT
    run.until_idle()
    assert "".join(other.parts) == run.runtime.text(ids("abc"), 40)


# Preemption since the memory runs out.


def test_when_blocks_run_out_the_youngest_request_waits_and_continues() -> None:
    """Three texts of up to 64 tokens in a cache of 96."""
    runtime = ToyRuntime(slots=3, max_length=64, blocks=6)
    run = Run(runtime)
    made = [run.submit("abcdefgh", max_tokens=56) for _ in range(3)]
    run.loop.step()
    assert all(request.slot is not None for request in made), "they get memory for what they have"
    lost = []
    while not all(request.is_finished for request in made):
        run.loop.step()
        run.loop.check_integrity()
        lost += [number for number, request in enumerate(made) if request.slot is None and not request.is_finished]
    assert lost[0] == 2 and 0 not in lost
    assert run.loop.metrics.preemptions.value > 0
    assert [request.finish_reason for request in made] == ["length"] * 3
    for request in made:
        assert "".join(request.parts) == runtime.text(ids("abcdefgh"), 56)
    assert run.loop.slots.pool.free == 6


def test_requests_whose_prompts_do_not_fit_wait_in_order() -> None:
    run = Run(ToyRuntime(slots=4, max_length=64, blocks=5))
    first, large, small = (run.submit("a" * length, max_tokens=2) for length in (30, 50, 1))
    run.loop.step()
    assert first.slot is not None and large.slot is None and small.slot is None, "nobody overtakes"
    run.until_idle()
    assert [request.generated for request in (first, large, small)] == [2, 2, 2]


def test_memory_for_all_that_may_run_is_used_by_all() -> None:
    """As before there were blocks: no room is kept where nothing can run out."""
    run = Run(ToyRuntime(slots=3, max_length=16))
    made = [run.submit("a" * 15, max_tokens=1) for _ in range(3)]
    run.loop.step()
    assert all(request.is_finished for request in made)


def test_a_text_that_no_memory_can_hold_is_refused_at_the_start() -> None:
    with pytest.raises(AssertionError, match="the longest text does not fit"):
        Run(ToyRuntime(slots=2, max_length=64, blocks=3))


@pytest.mark.parametrize("seed", few((0, 1), (0,)))
def test_random_requests_in_little_memory(seed: int) -> None:
    """With the integrity of slots, blocks and references checked after each."""
    rng = random.Random(seed)
    runtime = ToyRuntime(slots=6, max_length=96, blocks=rng.randint(6, 14), seed=seed)
    run = Run(runtime, prefill_tokens=rng.choice((7, 64)))
    drive_at_random(run, rng, 800, lambda: "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 70))), 60)
    assert run.loop.metrics.preemptions.value > 20 and run.loop.slots.pool.free == runtime.blocks


def test_each_stay_in_a_slot_is_recorded_with_its_first_token(tmp_path: Path) -> None:
    admission = RandomPreemption(random.Random(1))
    run = Run(ToyRuntime(slots=1), admission=admission)
    with recording(tmp_path) as reader:
        run.submit("abc", max_tokens=40)
        run.until_idle()
    stays: list[dict[str, Any]] = []
    for event in reader.read():
        if event.kind == "join":
            stays.append({"firsts": 0})
        elif event.kind == "first":
            stays[-1]["firsts"] += 1
        elif event.kind == "leave":
            stays[-1] |= event.values
    assert [stay["why"] for stay in stays] == ["preempted"] * len(admission.squashed) + ["length"] and len(stays) > 1
    before = [0, *(stay["tokens"] for stay in stays[:-1])]
    assert [stay["firsts"] for stay in stays] == [
        int(stay["tokens"] > had) for had, stay in zip(before, stays, strict=True)
    ]


def test_beams_are_recorded_as_one_stay_in_several_slots(tmp_path: Path) -> None:
    run = Run(ToyRuntime(slots=4))
    with recording(tmp_path) as reader:
        run.submit("abc", max_tokens=12, num_beams=3)
        run.until_idle()
    join, first, leave = reader.read()
    assert [event.kind for event in (join, first, leave)] == ["join", "first", "leave"]
    assert join.values["slots"] == [0, 1, 2]
    assert {first.values["slot"], leave.values["slot"]} <= {0, 1, 2}


def test_a_failure_is_recorded_as_the_end_of_all_stays(tmp_path: Path) -> None:
    run = Run(ToyRuntime(slots=300))
    with recording(tmp_path) as reader:
        run.submit("abc", max_tokens=12)
        run.loop.step()
        run.loop.slots.clear()
    assert [(event.kind, event.values.get("why")) for event in reader.read()][-1] == ("clear", "failed")
