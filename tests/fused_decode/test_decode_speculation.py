"""The loop with proposed tokens: every answer is the one that it is without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.engine.sampling.logit_edits import TokenRules
from shapeshift.fused_decode.engine.speculation import Speculator
from shapeshift.fused_decode.policy.speculation import IterationTimes
from shapeshift.fused_decode.request import ABORT, Request
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests.fused_decode.toy import LETTERS, FreeTokens, Run, ToyRuntime, drive_at_random, ids, text_of
from tests.sampling import few


def speculating(runtime: ToyRuntime | None = None, most: int = 4, **options: Any) -> Run:
    made = Speculator(most, shortest=1, longest=3, times=FreeTokens())
    return Run(runtime or ToyRuntime(repeats=True), speculator=made, **options)


def counted(run: Run) -> tuple[float, float]:
    metrics = run.loop.metrics
    return metrics.draft_tokens.value, metrics.accepted_tokens.value


def test_a_text_that_repeats_itself_takes_fewer_iterations() -> None:
    run = speculating()
    request = run.submit("hello", max_tokens=50)
    iterations = run.until_idle()
    assert text_of(request) == run.runtime.text(ids("hello"), 50)
    drafted, accepted = counted(run)
    assert 0 < accepted <= drafted and iterations == 50 - accepted
    assert (request.generated, request.finish_reason, run.loop.metrics.generated_tokens.value) == (50, "length", 50)
    assert run.loop.metrics.between_tokens_ms.totals()[0][-1] == 49, "each token after the first counts"


def fields(rng: random.Random, number: int) -> dict[str, Any]:
    """Parameters of every kind that change what is chosen, or what is said of it."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.6, "seed": number, "top_k": 5},
        {"temperature": 0.4, "seed": number, "top_p": 0.9, "repetition_penalty": 1.05},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logprobs": 3},
        {"temperature": 0.5, "seed": number, "logprobs": 0},
        {"stop": ("ab", "c", "xyz")},
        {"stop_token_ids": (3, 9)},
        {"ignore_eos": True},
        {"prompt_logprobs": 2},
    )
    return {"max_tokens": rng.randint(1, 40), **rng.choice(kinds)}


def described(request: Request, logprobs: Callable[[Any], Any] = lambda values: values) -> tuple[Any, ...]:
    """What a client sees. logprobs: in place of a value, or of a list of them."""

    def plain(found: Any) -> list[Any]:
        return [
            (logprobs(one.logprob), one.rank, one.top.tolist(), logprobs(one.top_logprobs.tolist())) for one in found
        ]

    answer = (text_of(request), request.token_ids, request.generated, request.finish_reason, str(request.error))
    return *answer, plain(request.logprobs), plain(request.prompt_logprobs)


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_the_same_to_the_byte(seed: int) -> None:
    """Greedy and sampled, with penalties, bans, logprobs, stop texts and ends in the middle, alone and together."""
    rng = random.Random(seed)
    asked = []
    for number in range(60):
        prompt = "".join(rng.choice("abcdefg") for _ in range(rng.randint(1, 30)))
        asked.append((prompt, fields(rng, number), rng.random() < 0.2))

    def run_all(run: Run, together: int) -> list[Request]:
        run.runtime.eos_at = 50
        made = []
        for number, (prompt, given, banned) in enumerate(asked):
            request = run.request(prompt, **given)
            if banned:
                request.rules = TokenRules(sequences=((1, 2), (5,)), min_tokens=3)
            run.loop.submit(request)
            made.append(request)
            for _ in range(0 if number % together else 3):
                run.loop.step()
                run.loop.check_integrity()
        run.until_idle()
        return made

    options = {"slots": 5, "seed": seed, "repeats": True, "blocks": 14}
    expected = run_all(Run(ToyRuntime(**options), caching=True), 1)  # type: ignore[arg-type]
    run = speculating(ToyRuntime(**options), most=rng.choice((1, 4, 15)), caching=True)  # type: ignore[arg-type]
    found = run_all(run, 4)
    # Where torch samples, the last bits of a probability depend on the number of rows.
    near = partial(pytest.approx, abs=1e-6)
    for one, other in zip(found, expected, strict=True):
        assert described(one) == described(other, near)
    drafted, accepted = counted(run)
    assert accepted > 50 and drafted > accepted
    assert run.loop.metrics.generated_tokens.value >= sum(request.generated for request in found)


@pytest.mark.parametrize("seed", few((0, 1), (0,)))
def test_random_requests_in_little_memory(seed: int) -> None:
    """Slots, blocks and references are checked after each iteration, and what is shared against the texts."""
    rng = random.Random(seed)
    beginnings = ["".join(rng.choice(LETTERS) for _ in range(rng.randint(10, 60))) for _ in range(4)]
    runtime = ToyRuntime(slots=6, max_length=96, blocks=rng.randint(7, 16), seed=seed, repeats=True)
    run = speculating(runtime, most=rng.choice((3, 15)), prefill_tokens=rng.choice((7, 64)), caching=True)

    def prompt() -> str:
        return rng.choice(beginnings) + "".join(rng.choice("abc") for _ in range(rng.randint(0, 20)))

    drive_at_random(run, rng, 800, prompt, 40)
    assert run.loop.metrics.preemptions.value > 5 and run.loop.metrics.prefix_hits.value > 300
    assert counted(run)[1] > 300
    assert run.loop.slots.pool.free == runtime.blocks and run.loop.slots.pool.held == 0


def test_proposals_take_no_block_that_others_need() -> None:
    """Four texts fill the cache: none loses its slot sooner than without proposals."""
    made = []
    for run in (
        Run(ToyRuntime(slots=4, blocks=8, repeats=True)),
        speculating(ToyRuntime(slots=4, blocks=8, repeats=True), most=15),
    ):
        requests = [run.submit("abcabc", max_tokens=26) for _ in range(4)]
        run.until_idle()
        assert run.loop.metrics.preemptions.value == 0
        made.append([text_of(request) for request in requests])
    assert made[0] == made[1]


def test_only_tokens_that_were_chosen_are_shared() -> None:
    """A block is shared by the hash of its tokens: a text that goes on otherwise finds what it would compute."""
    run = speculating(ToyRuntime(slots=1, repeats=True), most=15, caching=True)
    prompt = "abcabcabcabcab"
    first = run.submit(prompt, max_tokens=40)
    run.until_idle()
    assert counted(run)[0] > counted(run)[1], "some proposals were wrong"
    second = run.submit(prompt + text_of(first), max_tokens=5)
    run.until_idle()
    assert run.loop.metrics.prefix_hits.value == 48
    assert text_of(second) == run.runtime.text(ids(prompt + text_of(first)), 5)


def test_a_request_that_is_ended_keeps_what_it_had() -> None:
    run = speculating()
    request = run.submit("hello", max_tokens=50)
    for _ in range(12):
        run.loop.step()
    run.loop.end(request, ABORT)
    run.until_idle()
    assert request.finish_reason == ABORT and run.runtime.text(ids("hello"), 50).startswith(text_of(request))
    assert request.generated == len(text_of(request)) == len(request.token_ids)


class CountingGrammar:
    """Allows everything, and asserts that it hears of each token in turn."""

    is_ready = may_join = True

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def failure(self, now: float) -> None:
        return None

    def end(self) -> None:
        """Nothing is computed."""

    def allowed(self, vocab_size: int) -> None:
        return None

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return False


def test_a_structured_answer_has_no_proposals() -> None:
    run = speculating()
    request = run.request("hello", max_tokens=40)
    request.grammar = CountingGrammar()
    run.loop.submit(request)
    run.until_idle()
    assert counted(run) == (0, 0) and request.grammar.accepted == request.token_ids


def test_prompts_are_computed_without_proposals() -> None:
    run = speculating(ToyRuntime(slots=2, repeats=True), prefill_tokens=4)
    run.submit("hello", max_tokens=50)
    for _ in range(12):
        run.loop.step()
    before = counted(run)
    run.submit("a" * 40, max_tokens=1)
    for _ in range(9):
        run.loop.step()
    assert counted(run) == before
    run.until_idle()
    assert counted(run) > before


def test_logits_that_are_not_finite_end_one_request() -> None:
    run = speculating(ToyRuntime(slots=2, repeats=True))
    expected = run.runtime.text(ids("hello"), 40)
    broken, other = run.submit("hello", max_tokens=40), run.submit("xyxyxyxy", max_tokens=30)
    plain, row = run.runtime.text(ids("xyxyxyxy"), 30), run.runtime.row

    def failing(context: Any) -> Any:
        made = row(context)
        if len(context) >= 25 and LETTERS[int(context[0])] == "h":
            made[:] = float("nan")
        return made

    run.runtime.row = failing  # type: ignore[method-assign]
    run.until_idle()
    assert "not finite" in str(broken.error) and broken.generated == 21
    assert expected.startswith(text_of(broken)) and text_of(other) == plain


def test_where_nothing_is_gained_nothing_is_verified() -> None:
    """Times are learned: here each token takes as long as an iteration."""

    class Dear(IterationTimes):
        def observe(self, tokens: int, seconds: float) -> None:
            super().observe(tokens, 0.01 * tokens)

        def waste(self, seconds: float) -> None:
            """On a busy machine a look-up may take long."""

    run = Run(ToyRuntime(repeats=True), speculator=Speculator(4, 1, 3, Dear()))
    request = run.submit("hello", max_tokens=50)
    iterations = run.until_idle()
    assert text_of(request) == run.runtime.text(ids("hello"), 50)
    assert 0 < counted(run)[0] <= 16 and iterations >= 44, "larger iterations are tried, and given up"


def test_times_with_beams_are_kept_apart() -> None:
    made = Speculator(4, 1, 3)
    run = Run(ToyRuntime(), speculator=made)
    run.submit("hello", max_tokens=10, num_beams=2)
    run.until_idle()
    assert made.beside_beams.knows(2) and not made.plain.knows(2)
    for text in ("hello", "world"):
        run.submit(text, max_tokens=10)
    run.until_idle()
    assert made.plain.knows(2)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"num_speculative_tokens": 16}, "num_speculative_tokens: got 16; 0 to 15"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: got -1; 0 to 15"),
    ],
)
def test_settings_outside_their_ranges_are_refused(stated: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        FusedDecodeSettings("x", **stated)  # type: ignore[arg-type]
