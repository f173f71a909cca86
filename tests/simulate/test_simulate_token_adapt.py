"""The simulated device on small queues with known results, and the algorithms compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapeshift.simulate.token_adapt import EVICTED, IN_TIME, LATE, run
from shapeshift.token_adapt.policy.costs import Costs, GammaProfile
from shapeshift.token_adapt.policy.image_scheduler import SchedulerSettings
from shapeshift.workloads.trace import Trace
from tests.sampling import few

SIZE = 16
GAMMAS = (-4, 0, 2)
MS_AN_IMAGE = {-4: 1.0, 0: 2.0, 2: 3.0}
ACCURACY = np.array([0.7, 0.9, 0.95])


def costs(gammas: tuple[int, ...] = GAMMAS) -> Costs:
    """1 ms per batch, plus a constant time per image."""
    profiles = {g: GammaProfile(g, 16, {1: 1 + ms, 64: 1 + 64 * ms}, 1.0) for g, ms in MS_AN_IMAGE.items()}
    return Costs(profiles, gammas, SIZE)


def load(at_ms: list[float], latency_ms: float = 100.0, utility: float = 1.0) -> tuple[Trace, np.ndarray]:
    """The images and their accuracies."""
    count = len(at_ms)
    at_s, tokens = np.array(at_ms) / 1e3, np.ones(count, np.int64)
    trace = Trace(at_s, tokens, latency_ms=np.full(count, latency_ms), utility=np.full(count, utility))
    return trace, np.tile(ACCURACY, (count, 1))


def poisson(per_s: float, seconds: float, seed: int) -> tuple[Trace, np.ndarray]:
    rng = np.random.default_rng(seed)
    at_ms = np.sort(rng.uniform(0, seconds * 1e3, rng.poisson(per_s * seconds)))
    trace, accuracy = load(at_ms.tolist())
    latency_ms, utility = rng.choice([80.0, 150.0], len(trace)), rng.choice([0.1, 1.0], len(trace))
    return replace(trace, latency_ms=latency_ms, utility=utility), accuracy


def settings(algorithm: str, **changed: object) -> SchedulerSettings:
    defaults: dict[str, object] = {"price_window_ms": 0.0, "margin_ms": 0.0}
    return SchedulerSettings(algorithm, 80.0, 0.8, **{**defaults, **changed})  # type: ignore[arg-type]


def test_a_single_image_runs_at_the_most_accurate_gamma() -> None:
    served = run(costs(), settings("grid"), *load([0.0, 50.0]))
    assert served.done_ms == pytest.approx([4.0, 54.0])
    assert served.gamma.tolist() == [2, 2]
    assert served.total_utility(*load([0.0, 50.0])) == pytest.approx(1.9)


def test_simultaneous_images_share_a_batch() -> None:
    served = run(costs(), settings("grid"), *load([0.0] * 4))
    assert served.done_ms == pytest.approx([13.0] * 4)
    assert served.batch_sizes == [4]


def test_overload_is_evicted_and_nothing_is_late_without_noise() -> None:
    served = run(costs(), settings("grid"), *load([0.0] * 200, 50.0))
    assert set(served.outcome.tolist()) == {IN_TIME, EVICTED}
    assert (served.outcome == IN_TIME).sum() >= 40
    assert (served.gamma[served.outcome == EVICTED] == -1).all()


def test_a_batch_that_takes_longer_than_planned_is_late() -> None:
    served = run(costs(), settings("grid"), *load([0.0], 4.5), noise=lambda: 2.0)
    assert served.outcome.tolist() == [LATE]
    assert served.total_utility(*load([0.0], 4.5)) == 0.0


@pytest.mark.parametrize("per_s", few((450.0, 700.0), (450.0,)))
def test_planning_beats_fixed_gammas_and_the_papers_algorithms(per_s: float) -> None:
    utilities = {}
    trace, accuracy = poisson(per_s, 10.0, 1)
    for name, algorithm, gammas in (
        ("grid", "grid", GAMMAS),
        ("paper", "paper", GAMMAS),
        *((f"fixed {gamma}", "by_rate", (gamma,)) for gamma in GAMMAS),
    ):
        offered = trace, accuracy[:, [GAMMAS.index(gamma) for gamma in gammas]]
        utilities[name] = run(costs(gammas), settings(algorithm), *offered).total_utility(*offered)
    assert max(utilities, key=utilities.__getitem__) == "grid", utilities


def test_a_batch_that_follows_another_gamma_takes_longer() -> None:
    plain = settings("by_rate")
    arrivals = [0.0, 50.0, 100.0]
    served = run(costs((0,)), plain, *_of_gamma(load(arrivals)), switch_ms=[7.0])
    assert served.done_ms == pytest.approx([10.0, 53.0, 103.0])


def _of_gamma(offered: tuple[Trace, np.ndarray]) -> tuple[Trace, np.ndarray]:
    trace, accuracy = offered
    return trace, accuracy[:, 1:2]
