"""The shadow price of device time."""

from __future__ import annotations

import numpy as np
import pytest

from shapeshift.token_adapt.policy.costs import Costs
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler, SchedulerSettings, WaitingImage
from shapeshift.token_adapt.policy.plan import PlanProblem, ShadowPrice
from tests.token_adapt.token_models import PROFILES

TIMES = np.array([2.0, 4.0])


def price(arrivals: list[list[float]], window_ms: float = 100.0) -> float:
    made = ShadowPrice(window_ms)
    for at, utilities in enumerate(arrivals):
        made.add(float(at), np.array(utilities))
    return made.at(99.0, TIMES)


def test_the_price_is_0_if_the_time_suffices() -> None:
    assert price([]) == 0.0
    assert price([[1.0, 2.0]] * 25) == 0.0


def test_the_price_is_the_utility_of_the_last_ms() -> None:
    # 30 images at the second gamma need 120 ms. Some take the first one: 2 ms of device time are worth 1.
    assert price([[1.0, 2.0]] * 30) == pytest.approx(0.5, rel=1e-3)
    # 60 images at the first gamma still need 120 ms: some of those with utility 0.1 do not run.
    assert price([[1.0, 1.1]] * 40 + [[0.1, 0.1]] * 20) == pytest.approx(0.05, rel=1e-3)


def test_the_price_is_cached_and_old_arrivals_are_dropped() -> None:
    made = ShadowPrice(100.0)
    for place in range(60):
        made.add(float(place), np.array([1.0, 2.0]))
    first = made.at(60.0, TIMES)
    assert first > 0
    assert made.at(159.0, TIMES) == first
    assert made.at(161.0, TIMES) == 0.0


def test_old_arrivals_are_dropped_without_a_plan() -> None:
    made = ShadowPrice(100.0)
    for at in range(0, 10_000, 10):
        made.add(float(at), np.array([1.0]))
    assert len(made) <= 10


def test_the_price_reduces_utilities_except_of_excluded_gammas() -> None:
    problem = PlanProblem.of(0.0, [9.0], [[2.0, np.inf]], [[3.0, 5.0]]).with_shadow_price(0.5)
    assert problem.utilities.tolist() == [[2.0, 5.0]]


def test_images_run_faster_under_load_and_never_not_at_all() -> None:
    costs = Costs(PROFILES, (-4, 0, 2), 1)
    chosen: list[int] = []
    for window_ms in (0.0, 1000.0):
        made: ImageScheduler[WaitingImage] = ImageScheduler(costs, SchedulerSettings(price_window_ms=window_ms), -1e9)
        for place in range(1100):
            made.add(WaitingImage(place * 0.9, place * 0.9 + 1e6, 1.0, np.array([0.6, 0.61, 0.62])))
            if place < 1099:
                made.remove(lambda image: True)
        step = made.step(990.0)
        assert len(step.images) == 1
        chosen.append(step.gamma)
    assert chosen == [2, 0]
