"""A preempted request goes on bit for bit as if it had not been preempted, in each precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.sampling_params import SamplingParams
from tests.fused_decode.decode_models import VOCAB, Tiny
from tests.fused_decode.families import make
from tests.sampling import few

LENGTH, PROMPT, NEW = 128, 61, 40
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
PREEMPTED_AT = (1, 2, 9, 16, 17, 18, 33, 39)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Of gpt_oss: experts, windows and sinks. Of qwen3_5_text: states."""
    return cache(lambda name: make(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def model(
    request: pytest.FixtureRequest,
    tiny: Callable[[str], Tiny],
    family: Callable[[str], Tiny],
    kernel_cache: Path,
) -> DecodeModel:
    precision, kept, *name = request.param
    return DecodeModel.load(
        (family(name[0]) if name else tiny("llama")).folder,
        ModelOptions(
            precision=precision, kv_precision=kept, slots=3, max_length=LENGTH, threads=1, cache_dir=kernel_cache
        ),
        lambda line: None,
    )


def request_of(length: int, new: int, **fields: Any) -> Request:
    prompt = np.random.default_rng(length).integers(3, VOCAB, length)
    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=3, **fields)
    return Request("", prompt, params, TextStream([b""] * VOCAB), max_length=LENGTH)


def answer(model: DecodeModel, caching: bool, preempted_at: tuple[int, ...], **fields: Any) -> Any:
    """Tokens and logprobs of one request beside others, whose prompts leave it less room at each beginning."""
    pool = BlockPool(model.blocks, caching=caching)
    loop = DecodeLoop(model, FirstComeFirstServed(9), lambda _: None, print, pool=pool, prefill_tokens=48)
    loop.submit(request_of(21, 60, **GREEDY))
    made = request_of(PROMPT, NEW, **fields)
    loop.submit(made)
    left = list(preempted_at)
    while not made.is_finished:
        loop.step()
        loop.check_integrity()
        if left and made.generated == left[0]:
            del left[0]
            loop.slots.preempt(made)
            # It begins again together with a prompt that takes a part of the budget.
            loop.submit(request_of(17 + len(left), 3, **GREEDY))
            loop.admission.preempted(made)
    assert made.error is None and not left
    listed = [(one.logprob, one.rank, one.top.tolist(), one.top_logprobs.tolist()) for one in made.logprobs]
    return made.token_ids, listed


@pytest.mark.parametrize(
    "model",
    [
        *few(
            (("f32", "auto"), ("bf16", "auto"), ("bf16", "int8"), ("int8", "auto")), (("f32", "auto"), ("bf16", "int8"))
        ),
        *few(
            (
                (precision, "auto", name)
                for name in ("gpt_oss", "qwen3_5_text")
                for precision in ("f32", "bf16", "int8")
            ),
            (("bf16", "auto", "gpt_oss"), ("f32", "auto", "qwen3_5_text")),
        ),
    ],
    indirect=True,
)
@pytest.mark.parametrize("fields", [GREEDY, SAMPLED])
def test_a_preempted_answer_is_the_same_to_the_last_bit(model: DecodeModel, fields: dict[str, Any]) -> None:
    expected = answer(model, False, (), **fields)
    for caching in (False, True) if model.shares_prefixes else (False,):
        for place in PREEMPTED_AT:
            assert answer(model, caching, (place,), **fields) == expected, f"preempted after {place} tokens"
        assert answer(model, caching, PREEMPTED_AT, **fields) == expected, "preempted several times"


@pytest.mark.parametrize("model", [("f32", "auto", "gpt_oss")], indirect=True)
def test_a_preempted_answer_takes_no_block_that_another_text_has_computed_otherwise(model: DecodeModel) -> None:
    """A prompt of one block, which its own request computes alone, and another one as a part of a longer piece."""

    def bits(beside: bool) -> Any:
        pool = BlockPool(model.blocks, caching=True)
        loop = DecodeLoop(model, FirstComeFirstServed(9), lambda _: None, print, pool=pool, prefill_tokens=48)
        short = request_of(16, NEW, **GREEDY)
        if beside:
            longer = np.concatenate([short.prompt, request_of(20, 3).prompt])
            params = SamplingParams(max_tokens=NEW, ignore_eos=True, **GREEDY)
            loop.submit(Request("", longer, params, TextStream([b""] * VOCAB), max_length=LENGTH))
            loop.step()
        loop.submit(short)
        while not short.is_finished:
            loop.step()
            loop.check_integrity()
            if beside and short.generated == 6 and not short.joined_with:
                loop.slots.preempt(short)
                loop.admission.preempted(short)
        assert bool(short.joined_with) == beside
        return short.token_ids, [(one.logprob, one.top_logprobs.tolist()) for one in short.logprobs]

    assert bits(True) == bits(False)
