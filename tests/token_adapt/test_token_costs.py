"""The costs of batches by the profile."""

from __future__ import annotations

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.policy.costs import Costs, GammaProfile, efficient_batch_size

PROFILES = {
    0: GammaProfile(0, 65, {1: 10.0, 4: 16.0, 16: 40.0}, 2.0),
    -4: GammaProfile(-4, 41, {1: 8.0, 4: 11.0, 16: 23.0}, 1.0),
}


def test_times_are_linear_between_and_beyond_profiled_sizes() -> None:
    costs = Costs(PROFILES, (0, -4), 20)
    assert costs.gammas == (-4, 0)
    assert costs.times([1, 2, 4, 10, 16, 20])[:, 1] == pytest.approx([10, 12, 16, 28, 40, 48])
    assert costs.times([20])[0, 0] == pytest.approx(27.0)
    assert costs.min_time(16) == 23.0
    assert costs.memory([3]).tolist() == [[3.0, 6.0]]
    assert costs.throughput(16)[0] == pytest.approx(400.0)


def test_one_profiled_size_is_enough_and_times_never_decrease() -> None:
    one = {0: GammaProfile(0, 65, {2: 10.0}, 1.0)}
    assert Costs(one, (0,), 4).times([1, 2, 4])[:, 0] == pytest.approx([10, 10, 20])
    odd = {0: GammaProfile(0, 65, {1: 10.0, 2: 9.0, 3: 12.0}, 1.0)}
    assert Costs(odd, (0,), 3).times([1, 2, 3])[:, 0] == pytest.approx([10, 10, 12])


def test_times_follow_measured_batches() -> None:
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


def test_at_least_one_gamma_is_required() -> None:
    with pytest.raises(InvalidInputError, match="use_gammas"):
        Costs(PROFILES, (), 16)


def test_latencies_must_be_above_0() -> None:
    with pytest.raises(InvalidInputError, match="profile"):
        Costs({0: GammaProfile(0, 1, {1: 0.0}, 1.0)}, (0,), 4)


def test_the_batch_size_is_the_smallest_with_the_wanted_throughput() -> None:
    flat = GammaProfile(0, 65, {1: 10.0, 64: 640.0}, 1.0)
    assert efficient_batch_size(flat, 64, 0.95) == 1
    overhead = GammaProfile(0, 65, {1: 10.0, 64: 73.0}, 1.0)
    # n images take 9 + n ms.
    size = efficient_batch_size(overhead, 64, 0.95)
    assert size / (9 + size) >= 0.95 * 64 / 73 > (size - 1) / (9 + size - 1)
    assert efficient_batch_size(overhead, 64, 1.0) == 64
    assert efficient_batch_size(overhead, 8, 0.95) <= 8
