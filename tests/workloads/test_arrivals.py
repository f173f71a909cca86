from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.workloads import arrivals
from shapeshift.workloads.arrivals import State

Process = Callable[[float, float], np.ndarray]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


PROCESSES: dict[str, Process] = {
    "constant": arrivals.constant,
    "poisson": lambda rate, duration_s: arrivals.poisson(rate, duration_s, rng()),
    "mmpp": lambda rate, duration_s: arrivals.mmpp(rate, duration_s, rng()),
}


def dispersion(instants: np.ndarray, duration_s: float, window_s: float = 1.0) -> float:
    """Variance over mean of the counts in windows: 1 for Poisson, more for bursts."""
    counts, _ = np.histogram(instants, bins=int(duration_s / window_s), range=(0, duration_s))
    return float(counts.var() / counts.mean())


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_instants_are_ordered_within_the_run_and_as_many_as_the_rate_says(process: Process) -> None:
    instants = process(50.0, 2000.0)
    assert instants.dtype == np.float64
    assert np.all(np.diff(instants) >= 0)
    assert instants[0] >= 0
    assert instants[-1] < 2000.0
    assert len(instants) == pytest.approx(100_000, rel=0.15)


def test_constant_instants_are_evenly_spaced() -> None:
    assert arrivals.constant(4.0, 1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert arrivals.constant(3.0, 1.5).tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3])
    assert arrivals.constant(0.5, 1.0).tolist() == [0.0]


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(arrivals.poisson(100.0, 1000.0, rng()))
    assert gaps.mean() == pytest.approx(0.01, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert np.median(gaps) == pytest.approx(np.log(2) * gaps.mean(), rel=0.03)


def test_mmpp_is_burstier_than_poisson_and_has_its_mean() -> None:
    bursty = arrivals.mmpp(100.0, 10_000.0, rng())
    assert len(bursty) == pytest.approx(1_000_000, rel=0.05)
    plain = arrivals.poisson(100.0, 10_000.0, rng())
    assert dispersion(plain, 10_000.0) == pytest.approx(1.0, abs=0.1)
    assert dispersion(bursty, 10_000.0) > 10 * dispersion(plain, 10_000.0)


def test_mmpp_with_a_silent_state_sends_only_in_the_other() -> None:
    states = (State(weight=0, dwell_s=3.0), State(weight=1, dwell_s=1.0))
    instants = arrivals.mmpp(100.0, 4000.0, rng(), states)
    seconds = np.histogram(instants, bins=40_000, range=(0, 4000.0))[0]
    assert len(instants) == pytest.approx(400_000, rel=0.1)
    assert (seconds == 0).mean() == pytest.approx(0.75, abs=0.1)
    assert np.median(seconds[seconds > 0]) == pytest.approx(40, rel=0.15)


def test_mmpp_of_one_state_is_poisson_and_of_three_keeps_the_mean() -> None:
    one = arrivals.mmpp(100.0, 1000.0, rng(), (State(7.0, 1.0),))
    assert dispersion(one, 1000.0) == pytest.approx(1.0, abs=0.2)
    three = arrivals.mmpp(100.0, 10_000.0, rng(), (State(1, 2.0), State(2, 1.0), State(6, 0.5)))
    assert len(three) == pytest.approx(1_000_000, rel=0.05)


@pytest.mark.parametrize("process", [arrivals.poisson, arrivals.mmpp])
def test_the_seed_decides_the_instants(process: Callable[..., np.ndarray]) -> None:
    assert np.array_equal(process(50.0, 20.0, rng(1)), process(50.0, 20.0, rng(1)))
    assert not np.array_equal(process(50.0, 20.0, rng(1)), process(50.0, 20.0, rng(2)))


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_rate_or_duration_is_refused(process: Process, value: float) -> None:
    with pytest.raises(InvalidInputError, match="rate"):
        process(value, 1.0)
    with pytest.raises(InvalidInputError, match="duration_s"):
        process(1.0, value)


def test_states_are_read_from_text() -> None:
    assert arrivals.parse_states("0.6:8,2.6:2") == arrivals.BURSTY
    for text in ("", "1", "1:2,", "a:b", "1:2:3"):
        with pytest.raises(InvalidInputError, match="states"):
            arrivals.parse_states(text)
    with pytest.raises(InvalidInputError, match="dwell_s"):
        arrivals.parse_states("1:0")
    with pytest.raises(InvalidInputError, match="states"):
        arrivals.mmpp(1.0, 1.0, rng(), arrivals.parse_states("0:1,0:2"))
