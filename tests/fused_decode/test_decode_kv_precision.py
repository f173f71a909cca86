"""The loop over a model's own cache, in each precision that it may have: memory, beams and shared beginnings.

What a request gets must not depend on whether its blocks are copied, shared, or lost and computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, blocks_of
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.fused_decode.settings import KV_PRECISIONS
from tests.fused_decode.decode_models import VOCAB, Tiny
from tests.fused_decode.toy import found_by

LENGTH, NEW, SLOTS = 64, 24, 8
BEGINNING = 2 * BLOCK_TOKENS
GREEDY: dict[str, Any] = {}
BEAMS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3}

Answer = list[tuple[list[int], float]]
MakeRun = Callable[..., "Run"]


in_each_precision = pytest.mark.parametrize("kept", KV_PRECISIONS)


class Run:
    """A loop over a model; `answers` runs requests together and checks the integrity after each iteration."""

    def __init__(self, model: DecodeModel, caching: bool) -> None:
        pool = BlockPool(model.blocks, caching=caching)
        self.loop = DecodeLoop(model, FirstComeFirstServed(100), lambda updated: None, print, pool=pool)

    def answers(self, prompts: list[np.ndarray], fields: list[dict[str, Any]]) -> list[Answer]:
        """Tokens and scores of what each request returns, the best text first."""
        made = []
        for prompt, own in zip(prompts, fields, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, **own)
            made.append(Request("", prompt, params, TextStream([b""] * VOCAB), max_length=LENGTH))
            self.loop.submit(made[-1])
        while self.loop.step():
            self.loop.check_integrity()
        self.loop.check_integrity()
        assert self.loop.slots.pool.held == self.loop.slots.used == 0
        return [found_by(one) if one.beams else [(one.token_ids, 0.0)] for one in made]


@pytest.fixture
def over(tiny: Callable[[str], Tiny], kernel_cache: Path) -> MakeRun:
    def run(kept: str, texts: int = SLOTS, caching: bool = False) -> Run:
        """texts: of LENGTH tokens that the memory has room for."""
        model = DecodeModel.load(
            tiny("llama").folder,
            ModelOptions(
                precision="f32",
                kv_precision=kept,
                slots=SLOTS,
                max_length=LENGTH,
                blocks=texts * blocks_of(LENGTH),
                threads=1,
                cache_dir=kernel_cache,
            ),
            lambda line: None,
        )
        return Run(model, caching)

    return run


def prompts_of(lengths: list[int]) -> list[np.ndarray]:
    """With one beginning in common, as far as their lengths go."""
    chance = np.random.default_rng(3)
    beginning = chance.integers(3, VOCAB, BEGINNING)
    return [np.concatenate([beginning, chance.integers(3, VOCAB, LENGTH)])[:length] for length in lengths]


def alone(over: MakeRun, kept: str, prompts: list[np.ndarray], fields: list[dict[str, Any]]) -> list[Answer]:
    run = over(kept)
    return [run.answers([prompt], [own])[0] for prompt, own in zip(prompts, fields, strict=True)]


def assert_alike(found: list[Answer], wanted: list[Answer]) -> None:
    """Sums of recomputed tokens differ in their last bits, so scores may too."""
    for one, other in zip(found, wanted, strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], rel=1e-4)


@in_each_precision
def test_preempted_requests_continue_as_if_they_had_not_been(over: MakeRun, kept: str) -> None:
    prompts, fields = prompts_of([17, 19, 18, 20, 21]), [GREEDY] * 5
    run = over(kept, texts=3)
    found = run.answers(prompts, fields)
    assert run.loop.metrics.preemptions.value > 0
    assert_alike(found, alone(over, kept, prompts, fields))


@in_each_precision
def test_beams_among_other_requests_are_those_found_alone(over: MakeRun, kept: str) -> None:
    """They copy blocks, and with little memory they are preempted too."""
    prompts, fields = prompts_of([36, 21, 39, 35]), [GREEDY, BEAMS, BEAMS, GREEDY]
    expected = alone(over, kept, prompts, fields)
    for texts in (SLOTS, 4):
        run = over(kept, texts=texts)
        found = run.answers(prompts, fields)
        assert (run.loop.metrics.preemptions.value > 0) == (texts < SLOTS)
        assert_alike(found, expected)


@in_each_precision
def test_shared_beginnings_give_what_computed_ones_give(over: MakeRun, kept: str) -> None:
    prompts, fields = prompts_of([36, 37, 38, 39]), [GREEDY, BEAMS, GREEDY, BEAMS]
    run = over(kept, caching=True)
    found = run.answers(prompts[:1], fields[:1]) + run.answers(prompts[1:], fields[1:])
    assert run.loop.metrics.prefix_hits.value == 3 * BEGINNING
    assert_alike(found, alone(over, kept, prompts, fields))
