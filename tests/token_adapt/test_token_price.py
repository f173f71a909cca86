"""What the device's time is worth."""

from __future__ import annotations

import numpy as np
import pytest
from token_models import PROFILES

from shapeshift.token_adapt.adapter import AdaptRules, Query, TokenAdapter
from shapeshift.token_adapt.batching import BatchRules
from shapeshift.token_adapt.costs import Costs
from shapeshift.token_adapt.plan import PlanProblem
from shapeshift.token_adapt.price import TimePrice

TIMES = np.array([2.0, 4.0])


def price(worths: list[list[float]], window_ms: float = 100.0) -> float:
    made = TimePrice(window_ms)
    for place, brings in enumerate(worths):
        made.add(float(place), np.array(brings))
    return made.price(99.0, TIMES)


def test_time_that_suffices_costs_nothing() -> None:
    assert price([]) == 0.0
    assert price([[1.0, 2.0]] * 25) == 0.0


def test_scarce_time_costs_what_the_last_ms_brings() -> None:
    # 30 queries want 120 ms: some take the first gamma, at which the other's 2 ms more bring 1.
    assert price([[1.0, 2.0]] * 30) == pytest.approx(0.5, rel=1e-3)
    # 60 want 120 ms even so: of those worth 0.1 some are left out.
    assert price([[1.0, 1.1]] * 40 + [[0.1, 0.1]] * 20) == pytest.approx(0.05, rel=1e-3)


def test_what_is_long_ago_counts_no_longer_and_the_price_is_kept_for_a_while() -> None:
    made = TimePrice(100.0)
    for place in range(60):
        made.add(float(place), np.array([1.0, 2.0]))
    first = made.price(60.0, TIMES)
    assert first > 0
    assert made.price(159.0, TIMES) == first
    assert made.price(161.0, TIMES) == 0.0


def test_arrivals_that_never_lead_to_a_plan_are_forgotten() -> None:
    made = TimePrice(100.0)
    for at in range(0, 10_000, 10):
        made.add(float(at), np.array([1.0]))
    assert len(made) <= 10


def test_a_priced_problem_pays_for_time_and_not_for_gammas_that_are_barred() -> None:
    problem = PlanProblem.of(0.0, [9.0], [[2.0, np.inf]], [[3.0, 5.0]]).priced(0.5)
    assert problem.utilities.tolist() == [[2.0, 5.0]]


def test_who_comes_in_a_crowd_is_served_faster_and_never_not_at_all() -> None:
    costs, chosen = Costs(PROFILES, (-4, 0, 2), 1), []
    for window_ms in (0.0, 1000.0):
        made = TokenAdapter(costs, AdaptRules(batching=BatchRules(size=1), price_window_ms=window_ms), -1e9)
        for place in range(1100):
            made.add(Query(place * 0.9, place * 0.9 + 1e6, 1.0, np.array([0.6, 0.61, 0.62])))
            if place < 1099:
                made.remove(lambda query: True)
        step = made.step(990.0)
        assert len(step.queries) == 1
        chosen.append(step.gamma)
    assert chosen == [2, 0]
