"""Biases, bans and penalties, against a plain computation row by row and against transformers' own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from shapeshift.fused_decode.engine.sampling.device import DeviceLogits
from shapeshift.fused_decode.engine.sampling.logit_edits import LogitEdits, NumpyLogits, TokenRules, token_rules
from shapeshift.fused_decode.sampling_params import SamplingParams

VOCABULARY, LONGEST, EOS = 60, 40, (58, 59)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A token for each letter, and one for each letter with a space before it; no others but EOS."""

    def encode_piece(self, text: str) -> list[int]:
        made: list[int] = []
        space = False
        for letter in text:
            if letter != " ":
                made.append(LETTERS.index(letter) + 26 * space)
            space = letter == " "
        return made


def rules_of(params: SamplingParams, eos_ids: tuple[int, ...] = EOS) -> TokenRules | None:
    return token_rules(params, Letters().encode_piece, VOCABULARY, eos_ids)


def edited(
    logits: np.ndarray, params: list[SamplingParams], tokens: np.ndarray, prompts: list[int], lengths: list[int]
) -> np.ndarray:
    """`logits` after the edits of all rows at once, row i in slot i."""
    edits = LogitEdits(len(params), tokens)
    for slot, own in enumerate(params):
        edits.set(slot, own, prompts[slot], rules_of(own))
    made, slots = logits.copy(), np.arange(len(params))
    edits.apply(NumpyLogits(made), edits.rows(slots), slots, np.array(lengths))
    on_device = torch.from_numpy(logits.copy())
    edits.apply(DeviceLogits(on_device), edits.rows(slots), slots, np.array(lengths))
    np.testing.assert_array_equal(made, on_device.numpy())
    return made


def plainly(logits: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int]) -> np.ndarray:
    """The same of one row, token by token."""
    made = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        made[token] += bias
    for word in params.bad_words:
        for ids in (Letters().encode_piece(word), Letters().encode_piece(f" {word}")):
            if answer[len(answer) - len(ids) + 1 :] == ids[:-1]:
                made[ids[-1]] = -np.inf
    if len(answer) < params.min_tokens:
        made[[*EOS, *params.stop_token_ids]] = -np.inf
    for token in {*prompt, *answer}:
        made[token] *= params.repetition_penalty if made[token] < 0 else 1 / params.repetition_penalty
    for token in set(answer):
        made[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    return made


def random_params(rng: random.Random) -> SamplingParams:
    given: dict[str, Any] = {
        "repetition_penalty": rng.choice([0.5, 1.3]),
        "presence_penalty": rng.choice([-1.5, 2.0]),
        "frequency_penalty": rng.choice([-0.25, 0.7]),
        "logit_bias": tuple((token, rng.uniform(-100, 100)) for token in rng.sample(range(VOCABULARY), 5)),
        "bad_words": tuple(rng.choice(LETTERS) + rng.choice(["", "b"]) for _ in range(4)),
        "min_tokens": rng.randint(1, 16),
        "stop_token_ids": (rng.randrange(50),),
    }
    return SamplingParams(**{name: value for name, value in given.items() if rng.random() < 0.5})


def test_edits_are_those_of_a_plain_computation_and_alone_the_same_as_together() -> None:
    rng, numbers = random.Random(0), np.random.default_rng(0)
    banned = 0
    for _ in range(60):
        rows = rng.randint(1, 9)
        params = [random_params(rng) for _ in range(rows)]
        prompts = [rng.randint(1, 8) for _ in range(rows)]
        lengths = [prompt + rng.randint(0, 30) for prompt in prompts]
        # Few letters, so that tokens repeat and words occur.
        tokens = numbers.integers(0, 4, (rows, LONGEST)).astype(np.int32)
        logits = (numbers.standard_normal((rows, VOCABULARY)) * 3).astype(np.float32)
        got = edited(logits, params, tokens, prompts, lengths)
        for row, (own, prompt, length) in enumerate(zip(params, prompts, lengths, strict=True)):
            texts = tokens[row].tolist()
            wanted = plainly(logits[row], own, texts[:prompt], texts[prompt:length])
            np.testing.assert_allclose(got[row], wanted, rtol=1e-5, atol=1e-5)
            banned += int(np.isinf(wanted).sum())
            part = slice(row, row + 1)
            alone = edited(logits[part], [own], tokens[part], [prompt], [length])
            assert alone.tobytes() == got[part].tobytes()
    assert banned > 100


def test_a_row_without_such_parameters_is_not_looked_at() -> None:
    edits = LogitEdits(3, np.zeros((3, LONGEST), np.int32))
    plain = SamplingParams(temperature=0.5, top_k=3, stop=("a",), stop_token_ids=(4,), max_tokens=20)
    assert rules_of(plain) is None
    for slot, own in enumerate((plain, SamplingParams(min_tokens=2), plain)):
        edits.set(slot, own, 1, rules_of(own))
    assert edits.rows(np.arange(3)).tolist() == [1]


def test_edits_are_those_of_transformers() -> None:
    params = SamplingParams(
        repetition_penalty=1.7, logit_bias=((3, 2.5), (7, -4.0)), bad_words=("ab", "c"), min_tokens=6
    )
    numbers = np.random.default_rng(1)
    prompt = 4
    rules = rules_of(params)
    assert rules is not None
    words = [list(ids) for ids in rules.sequences]
    processors: Any = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[3], 2.5], [[7], -4.0]]),
            NoBadWordsLogitsProcessor(words, eos_token_id=list(EOS)),
            MinNewTokensLengthLogitsProcessor(prompt, 6, list(EOS), device="cpu"),
            RepetitionPenaltyLogitsProcessor(1.7),
        ]
    )
    for length in range(prompt, 20):
        tokens = numbers.integers(0, 3, (1, LONGEST)).astype(np.int32)
        # transformers looks for words in the prompt too.
        tokens[0, :prompt] = 20
        logits = numbers.standard_normal((1, VOCABULARY)).astype(np.float32)
        ids: Any = torch.from_numpy(tokens[:, :length].astype(np.int64))
        wanted = processors(ids, torch.tensor(logits)).numpy()
        np.testing.assert_allclose(edited(logits, [params], tokens, [prompt], [length]), wanted, rtol=1e-5, atol=1e-6)


def test_a_word_is_banned_with_and_without_a_space_before_it() -> None:
    rules = rules_of(SamplingParams(bad_words=("ab", " c")))
    assert rules is not None
    assert rules.sequences == ((0, 1), (26, 1), (2,), (28,))
    outside = token_rules(SamplingParams(bad_words=("z",)), Letters().encode_piece, 30, ())
    assert outside is not None and outside.sequences == ((25,),)


def test_tokens_that_a_grammar_allows() -> None:
    allowed = np.arange(VOCABULARY) % 3 == 0
    made = np.zeros((2, VOCABULARY), np.float32)
    on_device = torch.from_numpy(made.copy())
    for logits in (NumpyLogits(made), DeviceLogits(on_device)):
        logits.keep(1, allowed)
    assert (made[0] == 0).all() and np.array_equal(made[1] == 0, allowed) and np.isneginf(made[1][~allowed]).all()
    np.testing.assert_array_equal(made, on_device.numpy())
