"""Beam search in the decode loop: beams are rows that share blocks, join, leave, and come back together."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.request import ABORT, LENGTH, STOP
from tests.fused_decode.toy import EOS, Run, ToyRuntime, beams_alone, found_by, ids, text_of

PROMPT = "a prompt of thirty two letters, and more."
SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    {"num_beams": 3, "num_return_sequences": 3, "length_penalty": -1.5, "early_stopping": "never"},
    {"num_beams": 6, "length_penalty": 2.0, "early_stopping": "never", "repetition_penalty": 1.3},
    {"num_beams": 5, "num_return_sequences": 5, "stop_token_ids": (3, 9), "min_tokens": 4, "presence_penalty": 0.5},
    {"num_beams": 3, "ignore_eos": True, "logit_bias": ((7, 3.0),), "frequency_penalty": 1.0},
]


def ending(slots: int = 4, max_length: int = 64) -> ToyRuntime:
    """A toy whose texts may end anywhere."""
    runtime = ToyRuntime(slots, max_length)
    runtime.logits[:, EOS] = 4.5
    return runtime


def test_beams_have_blocks_in_common() -> None:
    run = Run(ToyRuntime(slots=4, max_length=96))
    request = run.submit(PROMPT, num_beams=4, max_tokens=40)
    shared = len(PROMPT) // BLOCK_TOKENS
    run.loop.step()
    run.loop.check_integrity()
    table = run.loop.slots
    beams = request.slots
    assert len(beams) == 4 and run.runtime.steps == [([0], [len(PROMPT)])], "the prompt is computed once"
    assert table.pool.held == shared + 4, "full blocks are shared, and each beam has a last one of its own"
    assert run.runtime.copied == 3
    for count in range(1, 40):
        assert run.loop.step() and request.generated == count + 1
        run.loop.check_integrity()
        assert {tuple(table.blocks[slot, :shared]) for slot in request.slots} <= {
            tuple(table.blocks[slot, :shared]) for slot in beams
        }
        assert run.runtime.steps[-1] == (sorted(run.runtime.steps[-1][0]), [1] * 4)
    assert request.finish_reason == LENGTH and table.pool.held == 0
    assert run.runtime.copied <= 3 * 40


def test_a_full_block_is_not_copied() -> None:
    run = Run(ToyRuntime(slots=3))
    run.submit("x" * BLOCK_TOKENS, num_beams=3, max_tokens=2)
    run.loop.step()
    run.loop.check_integrity()
    assert run.runtime.copied == 0 and run.loop.slots.pool.held == 3
    run.until_idle()


@pytest.mark.parametrize("caching", [False, True])
def test_searches_among_other_requests(caching: bool) -> None:
    """Each gets what it gets alone, whoever joins and leaves."""
    rng = random.Random(5)
    run = Run(ending(slots=9, max_length=96), caching=caching, prefill_tokens=20)
    made = []
    for number in range(30):
        fields = {**SEARCHES[number % len(SEARCHES)], "max_tokens": rng.randint(4, 40)}
        text = PROMPT[: rng.randint(1, len(PROMPT))]
        made.append((run.submit(text, **fields), text, fields))
        other, count = run.submit(text, max_tokens=9, ignore_eos=True), rng.randint(0, 9)
        for _ in range(count):
            run.loop.step()
            run.loop.check_integrity()
        if count == 9:
            run.loop.end(other, ABORT)
    run.until_idle()
    ends = set()
    for request, text, fields in made:
        assert found_by(request) == beams_alone(run.runtime, text, **fields)
        assert len(found_by(request)) == fields.get("num_return_sequences", 1)
        ends.add(request.finish_reason)
    assert ends == {STOP, LENGTH}
    assert run.loop.slots.pool.held == 0


@pytest.mark.parametrize("caching", [False, True])
def test_beams_leave_and_come_back_together(caching: bool) -> None:
    """The texts outgrow the memory: the search, which came last, waits for the others."""
    run = Run(ToyRuntime(slots=6, max_length=64, blocks=12), caching=caching)
    others = [run.submit("abcdefgh"[number:], max_tokens=56) for number in range(3)]
    run.loop.step()
    fields = {"num_beams": 3, "max_tokens": 36, "num_return_sequences": 3}
    request = run.submit("the same as ever, once more", **fields)
    held, lost = [], 0
    while not request.is_finished:
        run.loop.step()
        run.loop.check_integrity()
        held.append(request.slot is not None)
        lost += held[-2:] == [True, False] and not request.is_finished
    assert lost == run.loop.metrics.preemptions.value == 1 and request.generated == 36
    assert found_by(request) == beams_alone(run.runtime, "the same as ever, once more", **fields)
    run.until_idle()
    assert [text_of(other) for other in others] == [run.runtime.text(ids("abcdefgh"[at:]), 56) for at in range(3)]
    assert run.loop.slots.pool.free == 12


def test_a_search_waits_for_slots_and_memory_for_all_its_beams() -> None:
    run = Run(ToyRuntime(slots=4))
    first = run.submit("abc", max_tokens=5)
    search, last = run.submit("abc", num_beams=4, max_tokens=3), run.submit("abc", max_tokens=3)
    for _ in range(5):
        run.loop.step()
        run.loop.check_integrity()
        assert search.slot is None and last.slot is None, "nobody overtakes"
    assert first.is_finished
    run.loop.step()
    assert search.slot is not None and run.loop.slots.free == 0
    run.until_idle()
    assert last.finish_reason == LENGTH


def test_beams_that_never_fit_are_refused() -> None:
    table = Run(ToyRuntime(slots=4, max_length=64, blocks=7)).loop.slots
    request = Run(ToyRuntime(max_length=64)).request
    table.require_room(request("a" * 16, num_beams=3, max_tokens=16))
    with pytest.raises(InvalidInputError, match=r"num_beams: got 5; at most max_concurrency \(4\)"):
        table.require_room(request("a", num_beams=5))
    with pytest.raises(InvalidInputError, match=r"got 4; at most 3, the texts of 32 tokens that kv_cache_tokens \(112"):
        table.require_room(request("a" * 16, num_beams=4, max_tokens=16))


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_an_early_end_gives_the_beams_as_they_are(steps: int) -> None:
    run = Run(ToyRuntime(slots=3))
    fields = {"num_beams": 3, "num_return_sequences": 2}
    request = run.submit("abc", max_tokens=40, **fields)
    for _ in range(steps):
        run.loop.step()
    run.loop.end(request, ABORT)
    run.loop.step()
    assert request.finish_reason == ABORT and request.generated == steps and run.loop.slots.used == 0
    if steps:
        assert found_by(request) == beams_alone(run.runtime, "abc", max_tokens=steps, **fields)
    else:
        assert found_by(request) == [([], 0.0)] * 2


def test_logits_that_are_not_finite_cost_their_request_alone() -> None:
    run = Run(ToyRuntime(slots=4))
    plain = run.runtime.row
    run.runtime.row = lambda context: plain(context) * np.float32(np.nan if 0 in context[:1] else 1)  # type: ignore[method-assign]
    broken, other = run.submit("abc", num_beams=2, max_tokens=5), run.submit("xyz", num_beams=2, max_tokens=5)
    run.until_idle()
    assert "not finite" in str(broken.error) and len(found_by(other)[0][0]) == 5


def test_a_failed_iteration_costs_each_search_once() -> None:
    run = Run(ToyRuntime(slots=4))
    request = run.submit("abc", num_beams=3, max_tokens=9)
    run.loop.step()
    run.loop.fail(RuntimeError("lost"))
    assert run.finished == [request] and run.loop.slots.free == 4
    run.loop.check_integrity()
    again = run.submit("abc", num_beams=3, max_tokens=9)
    run.until_idle()
    assert len(found_by(again)[0][0]) == 9
