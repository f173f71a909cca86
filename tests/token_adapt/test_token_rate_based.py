"""Algorithm 3, its table, and the selection of INFaaS."""

from __future__ import annotations

import pytest

from shapeshift.token_adapt.policy.baselines import rate_based
from shapeshift.token_adapt.policy.costs import Costs, GammaProfile

PAPER = [(0.0, 8), (280.0, 4), (320.0, 2), (350.0, 0), (380.0, -5), (450.0, -10), (520.0, -15), (1000.0, -20)]
GAMMAS = [-20, -15, -10, -5, 0, 2, 4, 8]


@pytest.mark.parametrize(
    ("rate", "gamma"), [(0, 8), (279.9, 8), (280, 4), (349.5, 2), (350, 0), (999.9, -15), (1000, -20), (1e9, -20)]
)
def test_a_rate_selects_the_last_row_that_it_reaches(rate: float, gamma: int) -> None:
    assert rate_based.gamma_for_rate(rate, PAPER) == gamma


def test_a_rate_below_all_rows_selects_the_first() -> None:
    assert rate_based.gamma_for_rate(3.0, [(5.0, 2), (9.0, 0)]) == 2


def test_the_table_is_computed_from_the_profile() -> None:
    rows = rate_based.rate_table({0: 580.0, 8: 400.0, -15: 1000.0}, share=0.5)
    assert rows == [(0.0, 8), (200.0, 0), (290.0, -15)]


def test_a_gamma_that_is_not_faster_than_a_larger_one_has_no_row() -> None:
    rows = rate_based.rate_table({2: 100.0, 0: 90.0, -4: 120.0}, share=1.0)
    assert rows == [(0.0, 2), (100.0, -4)]


def allocated(rate: float, deadlines: list[float], worth: list[float], kappa: float = 0.8) -> list[int]:
    times = [[10.0, 20.0, 40.0]] * len(deadlines)
    rows = [(0.0, 8), (100.0, 0), (200.0, -5)]
    plan = rate_based.allocate(0.0, rate, rows, [-5, 0, 8], deadlines, times, worth, kappa)
    return [[-5, 0, 8][index] for index in plan]


def test_batches_get_the_gamma_of_the_rate() -> None:
    assert allocated(150.0, [100.0, 100.0], [0.1, 0.1]) == [0, 0]
    assert allocated(250.0, [100.0, 100.0], [0.1, 0.1]) == [-5, -5]


def test_late_batches_get_the_smallest_gamma_and_those_above_kappa_the_largest() -> None:
    assert allocated(150.0, [20.0, 31.0, 100.0], [0.9, 0.1, 0.9]) == [-5, 0, 8]
    # A mean utility equal to kappa is not above it; 10 + 20 = 30 is not before 30.
    assert allocated(150.0, [100.0, 40.0], [0.8, 0.8]) == [0, -5]


def test_lateness_overrides_utility() -> None:
    assert allocated(150.0, [15.0], [1.0]) == [-5]


def test_the_rate_is_that_of_the_last_second() -> None:
    window = rate_based.ArrivalRate()
    for at in (0.0, 500.0, 900.0, 1400.0):
        window.add(at)
    assert window.at(1000.0) == 3.0
    assert window.at(1500.0) == 2.0
    assert window.at(9000.0) == 0.0


def test_old_arrivals_are_dropped() -> None:
    window = rate_based.ArrivalRate()
    for at in range(0, 10_000, 10):
        window.add(float(at))
    assert len(window) <= 100


def test_infaas_changes_its_model_after_the_dwell_time() -> None:
    """Gamma 1 is used up to 16 images a second."""
    profiles = {gamma: GammaProfile(gamma, 16, {1: ms}, 1.0) for gamma, ms in ((0, 20.0), (1, 40.0))}
    choice = rate_based.Infaas(Costs(profiles, (0, 1), 1), dwell_ms=1000.0)

    def gamma(now: float, arrivals: int = 0) -> int:
        for _ in range(arrivals):
            choice.add(now)
        return choice.only_gamma(now)

    assert gamma(0.0, 10) == 1
    assert gamma(500.0, 20) == 1
    assert gamma(1400.0) == 1
    assert gamma(1501.0) == 1, "the rate fell before the time was over"
    assert gamma(2000.0, 20) == 1
    assert gamma(2999.0, 20) == 1
    assert gamma(3000.0) == 0
