"""Beam search against transformers' `generate`, in f32: token ids and scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.engine.sampling.logit_edits import TokenRules
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.sampling_params import SamplingParams
from tests.fused_decode.decode_models import VOCAB, Tiny
from tests.fused_decode.toy import found_by

EOS, NEW, LENGTH, PROMPTS = 2, 14, 64, 10
ENDS = tuple(range(100, 112))
BANNED = np.arange(40, 60)
SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 2, "early_stopping": True, "stop_token_ids": ENDS},
    {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True, "stop_token_ids": ENDS, "length_penalty": 0.5},
    {"num_beams": 4, "num_return_sequences": 4, "stop_token_ids": ENDS, "length_penalty": 2.0},
    {"num_beams": 8, "num_return_sequences": 8, "early_stopping": "never", "stop_token_ids": ENDS},
    {
        "num_beams": 3,
        "num_return_sequences": 2,
        "early_stopping": "never",
        "stop_token_ids": ENDS,
        "length_penalty": -1,
    },
    {"num_beams": 5, "stop_token_ids": ENDS, "repetition_penalty": 1.4, "length_penalty": 0.0},
    {"num_beams": 3, "num_return_sequences": 3, "stop_token_ids": ENDS, "min_tokens": 9},
    {"num_beams": 4, "stop_token_ids": ENDS, "logit_bias": ((7, 2.5), (9, -3.0)), "bad_words": ("banned",)},
    {"num_beams": 6, "num_return_sequences": 2, "ignore_eos": True},
]


def prompts_of(number: int) -> torch.Tensor:
    """The prompts of one of SEARCHES: all of one length, which transformers needs in a batch."""
    return torch.randint(3, VOCAB, (PROMPTS, 5 + 3 * number), generator=torch.Generator().manual_seed(number))


def expected(tiny: Tiny, number: int) -> list[list[tuple[list[int], float]]]:
    """What transformers returns for each of these prompts."""
    params, prompts = SamplingParams(max_tokens=NEW, **SEARCHES[number]), prompts_of(number)
    ends = [*(() if params.ignore_eos else (EOS,)), *params.stop_token_ids]
    edits: dict[str, Any] = {}
    if params.logit_bias:
        edits["sequence_bias"] = {(token,): bias for token, bias in params.logit_bias}
    if params.bad_words:
        edits["bad_words_ids"] = [[token] for token in BANNED.tolist()]
    if params.min_tokens:
        edits["min_new_tokens"] = params.min_tokens
    made = tiny.reference.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        num_beams=params.num_beams,
        num_return_sequences=params.num_return_sequences,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        repetition_penalty=params.repetition_penalty,
        max_new_tokens=NEW,
        eos_token_id=ends or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **edits,
    )
    answers = made.sequences[:, prompts.shape[1] :].tolist()
    lengths = [next((at + 1 for at, token in enumerate(row) if token in ends), NEW) for row in answers]
    rows = [
        (row[:length], score)
        for row, length, score in zip(answers, lengths, made.sequences_scores.tolist(), strict=True)
    ]
    return [rows[at : at + params.num_return_sequences] for at in range(0, len(rows), params.num_return_sequences)]


def request_of(prompt: torch.Tensor, **fields: Any) -> Request:
    params = SamplingParams(**{"max_tokens": NEW, **fields})
    rules = None
    if params.logit_bias or params.bad_words or params.min_tokens:
        rules = TokenRules(
            np.array([token for token, _ in params.logit_bias], np.int64),
            np.array([bias for _, bias in params.logit_bias], np.float32),
            tuple((token,) for token in BANNED.tolist()) if params.bad_words else (),
            np.array([EOS, *params.stop_token_ids], np.int64),
            params.min_tokens,
        )
    text = TextStream([b""] * VOCAB)
    return Request("", prompt.numpy().astype(np.int64), params, text, max_length=LENGTH, rules=rules)


@pytest.fixture(scope="module")
def references(tiny: Callable[[str], Tiny]) -> list[list[list[tuple[list[int], float]]]]:
    return [expected(tiny("llama"), number) for number in range(len(SEARCHES))]


@pytest.mark.parametrize(("blocks", "together"), [(0, False), (0, True), (20, True)])
def test_ids_and_scores_are_those_of_transformers(
    tiny: Callable[[str], Tiny],
    references: list[list[list[tuple[list[int], float]]]],
    kernel_cache: Path,
    blocks: int,
    together: bool,
) -> None:
    """100 prompts: alone, and among requests that join and leave, with little memory too."""
    model = DecodeModel.load(
        tiny("llama").folder,
        ModelOptions(precision="f32", slots=24, max_length=LENGTH, blocks=blocks, threads=2, cache_dir=kernel_cache),
        lambda text: None,
    )
    ended: list[Request] = []
    pool = BlockPool(model.blocks, caching=together)
    loop = DecodeLoop(model, FirstComeFirstServed(1000), ended.extend, print, pool=pool)
    made = []
    for place in range(PROMPTS):
        for number, fields in enumerate(SEARCHES):
            request = request_of(prompts_of(number)[place], **fields)
            made.append((request, references[number][place]))
            loop.submit(request)
            if together:
                loop.submit(request_of(prompts_of(number)[place], temperature=0.0, max_tokens=1 + number))
            while loop.step() and not together:
                pass
            loop.check_integrity()
    while loop.step():
        pass
    loop.check_integrity()
    assert (loop.metrics.preemptions.value > 0) == (blocks > 0)
    lengths = set()
    for request, wanted in made:
        found = found_by(request)
        lengths |= {len(tokens) for tokens, _ in found}
        for (tokens, score), (their_tokens, their_score) in zip(found, wanted, strict=True):
            assert score == pytest.approx(their_score, rel=1e-4), (request.sampling_params, tokens, their_tokens)
            # Texts may change places where their scores agree in all but the last bits.
            assert tokens == their_tokens or abs(score - their_score) < 2e-6
    assert len(lengths) > 10
