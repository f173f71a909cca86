"""What batches cost by the profile, and the price of time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.costs import Costs, fitting_size
from shapeshift.token_adapt.interfaces import GammaProfile
from shapeshift.token_adapt.price import TimePrice, demand, least_price

PROFILES = {
    0: GammaProfile(0, 65, {1: 10.0, 4: 16.0, 16: 40.0}, 2.0),
    -4: GammaProfile(-4, 41, {1: 8.0, 4: 11.0, 16: 23.0}, 1.0),
}


def test_times_are_straight_between_profiled_sizes_and_beyond_them() -> None:
    costs = Costs(PROFILES, (0, -4), 20)
    assert costs.gammas == (-4, 0)
    assert costs.times([1, 2, 4, 10, 16, 20])[:, 1] == pytest.approx([10, 12, 16, 28, 40, 48])
    assert costs.times([20])[0, 0] == pytest.approx(27.0)
    assert costs.fastest(16) == 23.0
    assert costs.memory([3]).tolist() == [[3.0, 6.0]]
    assert costs.throughput(16)[0] == pytest.approx(400.0)


def test_one_profiled_size_is_enough_and_times_never_fall() -> None:
    one = {0: GammaProfile(0, 65, {2: 10.0}, 1.0)}
    assert Costs(one, (0,), 4).times([1, 2, 4])[:, 0] == pytest.approx([10, 10, 20])
    odd = {0: GammaProfile(0, 65, {1: 10.0, 2: 9.0, 3: 12.0}, 1.0)}
    assert Costs(odd, (0,), 3).times([1, 2, 3])[:, 0] == pytest.approx([10, 10, 12])


def test_times_follow_what_batches_take() -> None:
    costs = Costs(PROFILES, (0, -4), 16)
    for _ in range(200):
        costs.observe(1, 16, 60.0)
    assert costs.factor == pytest.approx(1.5)
    assert costs.times([16])[0] == pytest.approx([34.5, 60.0])
    costs.observe(1, 16, 1e9)
    assert costs.factor == pytest.approx(1.65), "one batch moves it by a tenth at most"
    for _ in range(200):
        costs.observe(1, 16, 1e9)
    assert costs.factor <= 8.0


def test_gammas_are_named() -> None:
    with pytest.raises(InvalidInputError, match="use_gammas"):
        Costs(PROFILES, (), 16)


def test_latencies_are_above_0() -> None:
    with pytest.raises(InvalidInputError, match="profile"):
        Costs({0: GammaProfile(0, 1, {1: 0.0}, 1.0)}, (0,), 4)


def test_batches_are_as_large_as_throughput_needs() -> None:
    flat = GammaProfile(0, 65, {1: 10.0, 64: 640.0}, 1.0)
    assert fitting_size(flat, 64, 0.95) == 1
    overhead = GammaProfile(0, 65, {1: 10.0, 64: 73.0}, 1.0)
    # (n / (9 + n)) of 1000/s: 64 gives 877, and 40 is the first that gives 95% of it less the corner.
    size = fitting_size(overhead, 64, 0.95)
    assert size / (9 + size) >= 0.95 * 64 / 73 > (size - 1) / (9 + size - 1)
    assert fitting_size(overhead, 64, 1.0) == 64
    assert fitting_size(overhead, 8, 0.95) <= 8


def test_time_that_is_plenty_has_no_price() -> None:
    worths, times = np.array([[1.0, 2.0]]), np.array([1.0, 5.0])
    assert least_price(worths, times, 5.0) == 0.0
    assert least_price(np.zeros((0, 2)), times, 1.0) == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_the_price_is_the_least_at_which_the_queries_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(1, 9, 3))
    worths = np.sort(rng.uniform(0, 1, (12, 3)), axis=1)
    available = 0.5 * demand(worths, times, 0.0)
    price = least_price(worths, times, available)
    assert demand(worths, times, price) <= available
    assert demand(worths, times, price * (1 - 1e-4)) > available


def test_choices_at_the_price_are_the_best_for_the_time_they_take() -> None:
    rng = np.random.default_rng(3)
    times, worths = np.array([2.0, 3.0]), rng.uniform(0, 1, (6, 2))
    price = least_price(worths, times, 9.0)
    spent = demand(worths, times, price)
    left = worths - price * times
    chosen = np.where(left.max(axis=1) > 0, left.argmax(axis=1), -1)
    gained = sum(worths[query, gamma] for query, gamma in enumerate(chosen) if gamma >= 0)
    every = itertools.product((-1, 0, 1), repeat=6)
    fits = [plan for plan in every if sum(times[g] for g in plan if g >= 0) <= spent + 1e-9]
    best = max(sum(worths[query, gamma] for query, gamma in enumerate(plan) if gamma >= 0) for plan in fits)
    assert gained == pytest.approx(best)


def test_the_price_is_that_of_the_last_two_seconds() -> None:
    price = TimePrice(np.array([10.0]), 0.0)
    for at in range(400):
        price.add(float(at * 5), np.array([1.0]))
    assert price.price(2000.0) > 0
    assert price.price(2050.0) > 0
    assert price.price(9000.0) == 0.0
