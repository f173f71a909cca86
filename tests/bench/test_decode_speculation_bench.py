"""The loads and the table of `bench.fused_decode.speculation`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.fused_decode import copying
from bench.fused_decode.speculation import LOADS, Load, Round, cell, line
from bench.peers import random_llama


def test_a_prompt_is_a_text_with_some_tokens_replaced() -> None:
    texts = copying.texts()
    assert len(np.unique(texts)) == texts.size and texts.min() >= 2 and texts.max() < random_llama.VOCABULARY
    made = copying.prompts(20, np.random.default_rng(0))
    by_end = {tuple(text[-4:].tolist()): text for text in texts}
    shares = [float(np.mean(np.array(prompt) != by_end[tuple(prompt[-4:])])) for prompt in made]
    assert 0.05 < np.mean(shares) < 0.15 and len({tuple(prompt) for prompt in made}) == 20


def test_a_load_is_the_same_whichever_others_are_measured() -> None:
    made = [LOADS["docstrings"](np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert all(len(load.prompts) == 64 and {len(prompt) for prompt in load.prompts} == {100} for load in made)
    assert made[0].prompts == made[1].prompts != made[2].prompts


def test_a_cell_has_medians_and_shares() -> None:
    rounds = [Round(100.0, 200.0, 40.0, 30.0, 0.1), Round(50.0, 150.0, 60.0, 30.0, 0.2), Round(80.0, 80.0, 0, 0, 0.3)]
    found = cell(Load("copies", Path(), [], 10), 2, rounds)
    assert (found["plain"], found["proposing"], found["ratio"]) == (80.0, 150.0, 2.0)
    assert found["accepted"] == 0.6 and abs(found["drafted"] - 100 / 60) < 1e-9 and found["foreign"] == 0.2
    assert line(found).split() == ["copies", "2", "80", "150", "2.00", "1.67", "0.60", "0.20"]
