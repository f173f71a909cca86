"""Which proposed tokens are verified: the rule, over times that the tests state."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

import pytest

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.native_operations import KERNELS
from shapeshift.fused_decode.policy.speculation import (
    FIRST_CHANCE,
    FORGOTTEN_AFTER,
    LEAST_GAIN,
    MOST_SLOWER,
    IterationTimes,
    can_pay,
    updated_chance,
    verified_tokens,
)
from shapeshift.fused_decode.settings import MOST_DRAFTED


def learned(time: Callable[[int], float], *sizes: int) -> IterationTimes:
    times = IterationTimes()
    for size in sizes * 4:
        times.observe(size, time(size))
    return times


def test_the_kernels_and_the_blocks_allow_so_many_tokens() -> None:
    assert MOST_DRAFTED < BLOCK_TOKENS, "a proposal needs at most one block more"
    assert f"kFew = {MOST_DRAFTED + 1};" in (KERNELS / "attention_layer.h").read_text()


def flat(tokens: int) -> float:
    """Reading the weights is all that takes time."""
    return 10.0


def proportional(tokens: int) -> float:
    """Each token takes as long."""
    return 10.0 * tokens


def affine(fixed: float, each: float, tokens: int) -> float:
    return fixed + each * tokens


def expected_tokens(chance: float, count: int) -> float:
    return sum(chance**number for number in range(1, count + 1))


# How many tokens are verified.


def test_where_tokens_cost_nothing_all_likely_ones_are_verified() -> None:
    assert verified_tokens(2, [0.9, 0.5], [5, 5], flat) == [5, 3], "0.5^4 is not likely"


def test_where_each_token_costs_as_much_none_is_verified() -> None:
    assert verified_tokens(32, [0.99] * 32, [7] * 32, proportional) == [0] * 32


def test_a_proposal_that_is_likely_goes_before_one_that_is_not() -> None:
    found = verified_tokens(8, [0.3, 0.95, 0.6], [8, 8, 8], partial(affine, 40.0, 0.1))
    assert found == [1, 8, 3]


def test_nobody_waits_for_the_tokens_of_others() -> None:
    """Each token takes a fourteenth of an iteration of four rows."""
    time = partial(affine, 10.0, 1.0)
    assert verified_tokens(4, [0.9] * 4, [8] * 4, time) == [5] * 4, "all gain"
    assert verified_tokens(4, [0.9] * 3, [8] * 3, time) == [0] * 3, "one has no proposal"
    assert verified_tokens(4, [0.9] * 3 + [0.02], [8] * 4, time) == [0] * 4, "or one that is unlikely"
    assert verified_tokens(1, [0.9], [8], time) == [8]


def test_the_choice_is_the_best_one() -> None:
    """Of all that let a row without a proposal wait little longer."""
    rng = random.Random(0)
    taken = 0
    for _ in range(200):
        rows = rng.randint(4, 9)
        chances, most = [rng.random() for _ in range(3)], [rng.randint(0, 4) for _ in range(3)]
        time = partial(affine, rng.random() * 40, rng.random() / 5)
        rates = {
            counts: (rows + sum(map(expected_tokens, chances, counts))) / time(rows + sum(counts))
            for counts in itertools.product(*(range(count + 1) for count in most))
            if all(chance**count >= 0.1 for chance, count in zip(chances, counts, strict=True))
            and time(rows + sum(counts)) <= MOST_SLOWER * time(rows)
        }
        found = tuple(verified_tokens(rows, chances, most, time))
        if any(found):
            assert rates[found] == pytest.approx(max(rates.values()))
            taken += 1
        else:
            assert max(rates.values()) < rates[0, 0, 0] * LEAST_GAIN
    assert 20 < taken < 180


def test_look_ups_that_lead_to_nothing_take_little_time() -> None:
    times = learned(flat, 1)
    assert can_pay(1, 8, times)
    times.waste(0.25)
    waited = 0
    while not can_pay(1, 8, times):
        times.observe(1, 10.0)
        waited += 1
    assert waited == 3, "a hundredth of 30 seconds"


def test_without_proposals_nothing_is_verified() -> None:
    assert verified_tokens(4, [], [], flat) == []


# Whether a look-up can pay.


def test_nothing_is_proposed_before_the_time_without_proposals_is_known() -> None:
    times = IterationTimes()
    for _ in range(3):
        assert not can_pay(1, 8, times)
        times.observe(1, 10.0)
    assert can_pay(1, 8, times), "other sizes are unknown, and are tried"


def test_proposals_stop_where_all_of_them_would_not_pay() -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 288)
    assert can_pay(32, 8, learned(flat, *sizes))
    assert not can_pay(32, 8, learned(proportional, *sizes))
    assert not can_pay(1, 1, learned(proportional, *sizes))


# The times.


def test_times_between_measured_sizes_are_interpolated() -> None:
    times = learned(lambda tokens: 10.0 + tokens, 1, 8, 16, 64)
    for tokens in (1, 2, 5, 8, 12, 16, 40, 64):
        assert times.estimate(tokens) == pytest.approx(10.0 + tokens)
    assert times.estimate(128) == times.estimate(64), "it is tried"
    assert times.estimate(256) == pytest.approx(2 * times.estimate(64)), "it is not"


def test_one_slow_iteration_says_little() -> None:
    times = learned(flat, 4)
    times.observe(4, 1000.0)
    assert times.estimate(4) == 12.0
    for _ in range(60):
        times.observe(4, 20.0)
    assert times.estimate(4) == pytest.approx(20.0, rel=0.01), "but many do"


def test_the_first_times_count_alike() -> None:
    """As they do for sizes that are seldom measured: the least one would make those look faster than they are."""
    times = IterationTimes()
    for seconds in (10.0, 12.0, 17.0):
        times.observe(1, seconds)
    assert times.estimate(1) == pytest.approx(13.0)


def test_old_times_are_forgotten() -> None:
    times = learned(proportional, 4, 8)
    for _ in range(FORGOTTEN_AFTER):
        times.observe(4, 40.0)
    assert times.knows(4) and not times.knows(8)
    assert times.estimate(8) == 40.0


# The chance of a proposed token.


def test_the_chance_follows_what_the_model_chooses() -> None:
    chance = FIRST_CHANCE
    for _ in range(20):
        chance = updated_chance(chance, 4, missed=True)
    assert 0.7 < chance < 0.85, "four of five"
    for _ in range(20):
        chance = updated_chance(chance, 0, missed=True)
    assert chance < 0.02
    assert updated_chance(0.0, 8, missed=False) > 0.8
    assert updated_chance(0.4, 0, missed=False) == pytest.approx(0.4), "nothing was compared"
