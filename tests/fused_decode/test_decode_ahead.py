"""Steps that are launched before the last one's tokens are known, over a toy that takes them as a GPU does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from shapeshift.errors import EngineError
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.sampling.logit_edits import TokenRules
from shapeshift.fused_decode.request import ABORT, Request
from tests.fused_decode.toy import EOS, LETTERS, TABLE, Run, ToyRuntime, drive_at_random, ids, text_of
from tests.sampling import few


def both(fields: dict[str, Any], prompt: str = "abc", eos_at: int | None = None) -> list[tuple[Run, Request]]:
    """The same request where each step waits for the last one, and where it does not."""
    found = []
    for ahead in (False, True):
        run = Run(ToyRuntime(ahead=ahead))
        run.runtime.eos_at = eos_at
        found.append((run, run.submit(prompt, **fields)))
        run.until_idle()
    return found


@pytest.mark.parametrize("seed", few(range(6), (0, 2)))
def test_requests_that_come_and_go_get_the_text_they_get_alone(seed: int) -> None:
    """With arrivals, chunks, early ends, and beams, which wait for their tokens."""
    rng = random.Random(seed)
    runtime = ToyRuntime(slots=rng.choice((1, 3, 8)), max_length=48, seed=seed, ahead=True)
    run = Run(runtime, prefill_tokens=rng.choice((1, 5, 64)), caching=bool(seed % 2))
    drive_at_random(run, rng, 300, lambda: "".join(rng.choices(LETTERS, k=rng.randint(1, 40))), 40)
    assert runtime.fed_steps > 20


@pytest.mark.parametrize("seed", few(range(4), (0, 3)))
def test_in_little_memory(seed: int) -> None:
    """Who needs a block that there is not preempts another, whose tokens are known then."""
    rng = random.Random(seed)
    runtime = ToyRuntime(slots=6, max_length=64, seed=seed, blocks=rng.randint(4, 9), ahead=True)
    run = Run(runtime, prefill_tokens=7, caching=bool(seed % 2))
    drive_at_random(run, rng, 250, lambda: "".join(rng.choices("ab", k=rng.randint(1, 30))), 30)
    assert run.loop.metrics.preemptions.value > 0 and runtime.fed_steps > 20


def test_a_step_is_launched_before_the_text_of_the_last_one_is_made() -> None:
    run, events = Run(ToyRuntime(ahead=True)), list[str]()
    request = run.request("abc", max_tokens=4, stream=True)

    class Text(TextStream):
        def add(self, token: int) -> str:
            events.append("read")
            return super().add(token)

    run.runtime.before = lambda: events.append("launch")
    request.text = Text(TABLE)
    run.loop.submit(request)
    run.until_idle()
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]
    assert text_of(request) == run.runtime.text(ids("abc"), 4) and len(request.parts) == 4


def test_a_limit_is_known_before_and_costs_no_row() -> None:
    (plain, first), (run, request) = both({"max_tokens": 9})
    assert run.runtime.steps == plain.runtime.steps and text_of(request) == text_of(first)
    assert request.finish_reason == "length" and request.generated == 9


@pytest.mark.parametrize("how", ["eos", "stop", "stop token"])
def test_an_end_that_is_seen_late_costs_one_row_and_changes_no_answer(how: str) -> None:
    text = ToyRuntime().text(ids("abc"), 20)
    fields: dict[str, Any] = {"max_tokens": 20}
    if how == "stop":
        fields["stop"] = (text[5:8],)
    if how == "stop token":
        fields["stop_token_ids"] = (LETTERS.index(text[6]),)
    (plain, first), (run, request) = both(fields, eos_at=8 if how == "eos" else None)
    assert len(run.runtime.steps) == len(plain.runtime.steps) + 1
    assert (request.finish_reason, text_of(request)) == ("stop", text_of(first))
    assert request.token_ids == first.token_ids and request.generated == first.generated
    assert run.loop.metrics.generated_tokens.value == request.generated


def test_the_slot_and_blocks_of_a_row_that_is_dropped_serve_the_next_request() -> None:
    """They are free while the step that still has the row is in flight."""
    run = Run(ToyRuntime(slots=1, max_length=32, ahead=True))
    run.runtime.eos_at = 8
    made = [run.submit("abcde"[:count], max_tokens=20) for count in (1, 5, 3, 2, 4)]
    run.until_idle()
    for request in made:
        assert text_of(request) == run.runtime.text(request.prompt, 20) and request.token_ids[-1] == EOS


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_cancelled_request_gets_nothing_more(steps: int) -> None:
    run = Run(ToyRuntime(ahead=True))
    request, other = run.submit("abc", max_tokens=30), run.submit("xyz", max_tokens=12)
    for _ in range(steps):
        run.loop.step()
    run.loop.end(request, ABORT)
    got = request.generated
    run.loop.step()
    assert request.finish_reason == ABORT and request.generated == got
    run.until_idle()
    assert request.generated == got == len(request.token_ids)
    assert text_of(other) == run.runtime.text(ids("xyz"), 12)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 1.5, "seed": 6, "top_k": 7, "repetition_penalty": 1.2},
        {"logprobs": 3},
        {"prompt_logprobs": 2, "logprobs": 0},
        {"num_beams": 3},
    ],
)
def test_answers_are_the_same_with_and_without(fields: dict[str, Any]) -> None:
    """What changes logits by the tokens before, and beams, wait for these tokens."""
    (_, first), (_, second) = both({"max_tokens": 24, **fields}, prompt="hello world")
    assert first.token_ids == second.token_ids and text_of(first) == text_of(second)
    for name in ("logprobs", "prompt_logprobs"):
        pairs = list(zip(getattr(first, name), getattr(second, name), strict=True))
        assert all(np.array_equal(a.top, b.top) and a.logprob == b.logprob for a, b in pairs)
    if first.beams is not None and second.beams is not None:
        assert [one.tokens.tolist() for one in first.beams.best] == [one.tokens.tolist() for one in second.beams.best]


def test_rules_of_one_request_do_not_hold_up_the_tokens_of_others() -> None:
    run = Run(ToyRuntime(ahead=True))
    ruled = run.request("abc", max_tokens=6)
    ruled.rules = TokenRules(ends=np.array([EOS]), min_tokens=3)
    run.loop.submit(ruled)
    other = run.submit("xyz", max_tokens=12)
    run.until_idle()
    assert text_of(other) == run.runtime.text(ids("xyz"), 12)
    # Once it has ended, and in the first steps of the others.
    assert run.runtime.fed_steps >= 4


def test_texts_share_blocks_whose_tokens_are_known() -> None:
    """The last block of an answer is full one step before its last token is."""
    found = []
    for ahead in (False, True):
        run = Run(ToyRuntime(slots=2, max_length=64, ahead=ahead), caching=True)
        first = run.submit("abcdefgh", max_tokens=30)
        run.until_idle()
        again = "abcdefgh" + text_of(first)
        second = run.submit(again, max_tokens=9)
        run.until_idle()
        assert text_of(second) == run.runtime.text(ids(again), 9)
        found.append(run.loop.metrics.prefix_hits.value)
    assert found == [32, 32]


def test_a_failure_costs_what_runs_and_nothing_else() -> None:
    run = Run(ToyRuntime(ahead=True))
    request = run.submit("abc", max_tokens=30)
    for _ in range(3):
        run.loop.step()
    run.runtime.fail = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        run.loop.step()
    run.loop.fail(EngineError("lost"))
    run.runtime.fail = None
    later = run.submit("xyz", max_tokens=10)
    run.until_idle()
    assert str(request.error) == "lost" and text_of(later) == run.runtime.text(ids("xyz"), 10)


def test_logits_that_are_not_finite_end_one_request() -> None:
    run = Run(ToyRuntime(ahead=True))
    good, bad = run.submit("abc", max_tokens=8), run.submit("xyz", max_tokens=8)
    row = run.runtime.row

    def poisoned(context: Any) -> np.ndarray:
        made = row(context)
        if list(context[:3]) == list(ids("xyz")) and len(context) == 5:
            made[:] = float("nan")
        return made

    run.runtime.row = poisoned  # type: ignore[method-assign]
    run.until_idle()
    assert isinstance(bad.error, EngineError) and bad.generated == 3
    run.runtime.row = row  # type: ignore[method-assign]
    assert text_of(good) == run.runtime.text(ids("abc"), 8)
