"""Loads of the decode benchmark, and the figures of a run."""

from __future__ import annotations

import numpy as np
import pytest

from bench.common.cells import Run
from bench.fused_decode.loads import PAPER_REQUEST_S, PROMPT, Answers, Load, LoadGenerator, agreement, figures
from bench.peers.protocol import DecodeRequest, Replayed

WORDS = range(10, 50)


@pytest.fixture
def maker() -> LoadGenerator:
    return LoadGenerator(0, WORDS, new_tokens=5)


def test_prompts_are_made_of_the_words(maker: LoadGenerator) -> None:
    load = maker.at_once(3)
    assert load.tokens == 15
    assert all(len(request.prompt) == PROMPT and set(request.prompt) <= set(WORDS) for request in load.requests)
    assert len({tuple(request.prompt) for request in load.requests}) == 3


def test_long_prompts_begin_with_what_they_share(maker: LoadGenerator) -> None:
    first, (new,) = maker.long_prompt(100).requests[0].prompt, maker.long_prompt(100).requests
    (shared,) = maker.long_prompt(100, first[:68]).requests
    assert len(first) == len(new.prompt) == len(shared.prompt) == 100
    assert shared.prompt[:68] == first[:68] != new.prompt[:68] and shared.prompt[68:] != first[68:]


def test_same_seed_same_loads() -> None:
    one, other = (LoadGenerator(7, WORDS, 5).poisson(20, 2.0, 50) for _ in range(2))
    assert one == other != LoadGenerator(8, WORDS, 5).poisson(20, 2.0, 50)


def test_intervals_are_the_papers_in_proportion(maker: LoadGenerator) -> None:
    poisson = [request.at_s for request in maker.poisson(4000, PAPER_REQUEST_S / 2, 100).requests]
    assert poisson[0] == 0.0
    assert np.diff(poisson).mean() == pytest.approx(0.05, rel=0.1)


def test_figures_of_a_run() -> None:
    load = Load("two", [DecodeRequest(0.0, [1], 3), DecodeRequest(1.0, [1], 2)])
    answers = Answers(load, Replayed([[0.5, 0.7, 1.0], [1.25, 2.0]], [[1, 2, 3], [4, 5]], {"steps": 3.0}))
    run = figures(Run(answers, 0.0, 0.0))
    assert run["tokens_per_second"] == pytest.approx(5 / 2.0)
    assert (run["latency_ms"], run["first_token_ms"], run["steps"]) == pytest.approx((1000, 375, 3))
    assert run["between_ms"] == pytest.approx((200 + 300 + 750) / 3)


@pytest.mark.parametrize("stamps", [[[0.1]], [[0.2, 0.1]], [[0.1, 0.2, 0.3]]])
def test_a_wrong_number_of_tokens_or_a_wrong_order_is_noticed(stamps: list[list[float]]) -> None:
    load = Load("one", [DecodeRequest(0.0, [1], 2)])
    Answers(load, Replayed([[0.1, 0.2]], [[1, 2]]))
    with pytest.raises(ValueError, match="one: "):
        Answers(load, Replayed(stamps, [[1, 2]]))


def test_agreement_ends_with_the_first_difference() -> None:
    one, other = Replayed([], [[1, 2, 3, 4], [1, 2, 3, 4]]), Replayed([], [[1, 9, 3, 4], [1, 2, 3, 4]])
    assert agreement(one, one, 4) == 1.0
    assert agreement(one, other, 4) == pytest.approx((1 / 4 + 1) / 2)
    assert agreement(one, other, 1) == 1.0
