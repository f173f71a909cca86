"""Loads of the decode benchmark, and the figures that are taken from a run."""

from __future__ import annotations

import numpy as np
import pytest

from bench.decode_loads import LONGEST, PAPER_REQUEST_S, PROMPT, SHORTEST, Load, LoadMaker, Run, agreement, check
from bench.peers.decode_worker import Ask, Replayed

WORDS = range(10, 50)


@pytest.fixture
def maker() -> LoadMaker:
    return LoadMaker(0, WORDS, new=5)


def test_prompts_are_made_of_the_words(maker: LoadMaker) -> None:
    load = maker.at_once(3)
    assert load.tokens == 15
    assert all(len(ask.prompt) == PROMPT and set(ask.prompt) <= set(WORDS) for ask in load.asks)
    assert len({tuple(ask.prompt) for ask in load.asks}) == 3


def test_same_seed_same_loads() -> None:
    one, other = (LoadMaker(7, WORDS, 5).poisson(20, 2.0, 50) for _ in range(2))
    assert one == other != LoadMaker(8, WORDS, 5).poisson(20, 2.0, 50)


def test_intervals_are_the_papers_in_proportion(maker: LoadMaker) -> None:
    constant = [ask.at_s for ask in maker.constant(4, PAPER_REQUEST_S / 2).asks]
    assert constant == pytest.approx([0.0, 0.25, 0.5, 0.75])
    poisson = [ask.at_s for ask in maker.poisson(4000, PAPER_REQUEST_S / 2, 100).asks]
    assert poisson[0] == 0.0
    assert np.diff(poisson).mean() == pytest.approx(0.05, rel=0.1)


def test_lengths_are_uniform(maker: LoadMaker) -> None:
    wanted = [ask.new for ask in maker.lengths(4000).asks]
    assert (min(wanted), max(wanted)) == (SHORTEST, LONGEST)
    assert np.mean(wanted) == pytest.approx((SHORTEST + LONGEST) / 2, rel=0.05)


def test_figures_of_a_run() -> None:
    load = Load("two", [Ask(0.0, [1], 3), Ask(1.0, [1], 2)])
    run = Run(load, Replayed([[0.5, 0.7, 1.0], [1.25, 2.0]], [[1, 2, 3], [4, 5]]), 0.0)
    assert run.tokens_per_second == pytest.approx(5 / 2.0)
    assert run.latency_ms == pytest.approx([1000, 1000])
    assert run.first_token_ms == pytest.approx([500, 250])
    assert run.between_ms == pytest.approx([200, 300, 750])
    instants, counts = run.progress()
    assert instants.tolist() == [0.5, 0.7, 1.0, 1.25, 2.0] and counts.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("stamps", [[[0.1]], [[0.2, 0.1]], [[0.1, 0.2, 0.3]]])
def test_a_wrong_number_of_tokens_or_a_wrong_order_is_noticed(stamps: list[list[float]]) -> None:
    load = Load("one", [Ask(0.0, [1], 2)])
    check(load, Replayed([[0.1, 0.2]], [[1, 2]]))
    with pytest.raises(ValueError, match="one: "):
        check(load, Replayed(stamps, [[1, 2]]))


def test_agreement_ends_with_the_first_difference() -> None:
    one, other = Replayed([], [[1, 2, 3, 4], [1, 2, 3, 4]]), Replayed([], [[1, 9, 3, 4], [1, 2, 3, 4]])
    assert agreement(one, one, 4) == 1.0
    assert agreement(one, other, 4) == pytest.approx((1 / 4 + 1) / 2)
    assert agreement(one, other, 1) == 1.0
