from __future__ import annotations

import random

import pytest

from shapeshift.polymorph.staircase import step_ends

LENGTHS = list(range(16, 513, 16))


def steps(*ends: int, low: float = 1.0, rise: float = 0.5) -> list[float]:
    """The latency of each of LENGTHS on a staircase whose steps end there."""
    return [low + rise * sum(length > end for end in ends) for length in LENGTHS]


@pytest.mark.parametrize("ends", [(64, 128, 192), (16, 32), (496,), tuple(LENGTHS[:9]), ()])
def test_clean_steps(ends: tuple[int, ...]) -> None:
    assert step_ends(LENGTHS, steps(*ends)) == [*ends, 512]


@pytest.mark.parametrize("seed", range(20))
def test_noise_within_the_tolerance_makes_no_step(seed: int) -> None:
    rng = random.Random(seed)
    noisy = [ms * rng.uniform(0.98, 1.02) for ms in steps(64, 256, 400)]
    assert step_ends(LENGTHS, noisy) == [64, 256, 400, 512]


def test_tolerance_decides() -> None:
    curve = steps(256, rise=0.04)
    assert step_ends(LENGTHS, curve) == [512]
    assert step_ends(LENGTHS, curve, 0.03) == [256, 512]
    assert step_ends(LENGTHS, curve, 0.0) == [256, 512]
    assert step_ends([1, 2, 3], [1.0, 1.05, 1.0501]) == [2, 3]


def test_slow_creep_ends_a_step_where_it_has_added_up() -> None:
    assert step_ends(range(1, 8), [1.00, 1.02, 1.04, 1.06, 1.08, 1.10, 1.12]) == [3, 6, 7]


def test_a_dip_takes_what_is_slower_and_shorter() -> None:
    # 96 tokens are slower than 128: their texts belong on the engine of 128.
    assert step_ends([32, 64, 96, 128, 160], [1, 1, 3, 2, 4]) == [64, 128, 160]
    assert step_ends([32, 64, 96], [3, 2, 1]) == [96]
    # One slow measurement is no step.
    assert step_ends([32, 64, 96, 128], [1, 9, 1, 1]) == [128]


def test_single_point_and_free_engines() -> None:
    assert step_ends([48], [2.0]) == [48]
    assert step_ends([1, 2, 3], [0, 0, 0]) == [3]
    assert step_ends([1, 2, 3], [0, 0, 1]) == [2, 3]
