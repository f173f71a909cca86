"""The allocation problem: against brute force, against Gurobi, and at its edges."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest

from shapeshift import jit
from shapeshift.errors import UnsupportedError
from shapeshift.polymorph.policy.allocate import Allocation, allocate
from shapeshift.polymorph.policy.curves import MD1, Affine, Clamped, Curve, Table
from shapeshift.polymorph.policy.problem import Problem

KINDS = ("affine", "clamped", "table", "md1")


def objective(problem: Problem, counts: tuple[int, ...]) -> tuple[float, float]:
    """Eq. 1, written from the paper once more, and C_I."""
    total = left = served = 0.0
    for index, (demand, capacity, curve) in enumerate(
        zip(problem.demand, problem.capacity, problem.curves, strict=True)
    ):
        todo = left + demand
        served = todo if index == len(counts) - 1 else min(todo, counts[index] * capacity)
        left = max(todo - counts[index] * capacity, 0.0)
        if served > 0:
            total += curve.latency(served / counts[index]) * served
    return total, served


def brute_force(problem: Problem) -> float:
    """The least objective of all counts that keep the constraints; infinite where there are none."""
    least = [math.floor(q / m) for q, m in zip(problem.demand, problem.capacity, strict=True)]
    least[-1] = max(least[-1], 1)
    best = math.inf
    for head in itertools.product(*(range(low, problem.gpus + 1) for low in least[:-1])):
        last = problem.gpus - sum(head)
        if last >= least[-1]:
            total, served = objective(problem, (*head, last))
            if not problem.cap_last or served <= last * problem.capacity[-1] * (1 + 1e-9):
                best = min(best, total)
    return best


def some_curve(rng: np.random.Generator, kind: str, service: float, capacity: float) -> Curve:
    if kind == "table":
        return Table(tuple((service * rng.uniform(0.5, 1.5, rng.integers(1, 6))).tolist()))
    curves: dict[str, Curve] = {"affine": Affine(service), "clamped": Clamped(service), "md1": MD1(service, capacity)}
    return curves[kind]


def small(seed: int, cap_last: bool) -> Problem:
    """A problem small enough for brute force: whole or fractional, sometimes without demand, any mix of curves."""
    rng = np.random.default_rng(seed)
    runtimes, gpus = int(rng.integers(1, 6)), int(rng.integers(1, 13))
    service = np.sort(rng.uniform(1, 20, runtimes))
    capacity = np.maximum(np.floor(rng.uniform(20, 100) / service), 1.0)
    if rng.random() < 0.3:
        capacity = capacity + rng.random(runtimes)
    share = rng.dirichlet(np.ones(runtimes))
    demand = rng.uniform(0.1, 1.3) * gpus * share * capacity
    if rng.random() < 0.5:
        demand = np.floor(demand)
    demand[rng.random(runtimes) < 0.15] = 0.0
    kinds = rng.choice(KINDS, runtimes) if rng.random() < 0.3 else [str(rng.choice(KINDS))] * runtimes
    curves = tuple(
        some_curve(rng, str(kind), float(ms), float(most))
        for kind, ms, most in zip(kinds, service, capacity, strict=True)
    )
    return Problem(gpus, tuple(demand.tolist()), tuple(capacity.tolist()), curves, cap_last)


def cluster(seed: int, gpus: int, runtimes: int, load: float, kind: str = "affine", cap_last: bool = False) -> Problem:
    """As in the paper: even lengths up to 512, the latencies of its Fig. 2a, an SLO of 150 ms; lognormal lengths."""
    from scipy.stats import lognorm

    rng = np.random.default_rng(seed)
    edges = np.arange(1, runtimes + 1) * 512 / runtimes
    service = np.maximum(1.15 * (1 + 3.22 * (edges - 64) / 448), 0.5)
    capacity = np.floor(150.0 / service)
    below = lognorm.cdf(edges, rng.uniform(0.6, 1.0), scale=rng.uniform(40, 100))
    share = np.diff([0.0, *below[:-1], 1.0])
    demand = share * load * gpus / float((share / capacity).sum())
    curves = []
    for ms, most in zip(service.tolist(), capacity.tolist(), strict=True):
        rough = tuple(ms * (b + 1) / 2 * (1 + 0.1 * math.sin(b) / b) for b in range(1, 300))
        choices: dict[str, Curve] = {
            "affine": Affine(ms),
            "clamped": Clamped(ms),
            "md1": MD1(ms, most),
            "table": Table(rough),
        }
        curves.append(choices[kind])
    return Problem(gpus, tuple(demand.tolist()), tuple(capacity.tolist()), tuple(curves), cap_last)


def check(problem: Problem, found: Allocation) -> None:
    """What holds for every answer."""
    assert sum(found.counts) == problem.gpus
    scaled = Problem(problem.gpus, tuple(found.theta * q for q in problem.demand), problem.capacity, problem.curves)
    assert found.objective == pytest.approx(objective(scaled, found.counts)[0], rel=1e-12)
    for count, least in zip(found.counts, scaled.lower_bounds(), strict=True):
        assert count >= least


@pytest.mark.parametrize("cap_last", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_as_good_as_brute_force(block: int, cap_last: bool) -> None:
    solved = 0
    for seed in range(block * 50, block * 50 + 50):
        problem = small(seed, cap_last)
        found = allocate(problem)
        check(problem, found)
        if found.feasible:
            solved += 1
            assert found.objective == pytest.approx(brute_force(problem), rel=1e-9), problem
        elif found.theta < 1:
            assert sum(problem.lower_bounds()) > problem.gpus
        else:
            assert problem.cap_last and brute_force(problem) == math.inf
    assert solved >= 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", [4, 9])
def test_gurobi_finds_nothing_better_for_any_curve(kind: str, gpus: int) -> None:
    pytest.importorskip("gurobipy")
    problem = cluster(3, gpus, 3, 0.7, kind)
    exact = allocate(problem).objective
    check(problem, asked := allocate(problem, "gurobi"))
    assert asked.objective == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("cap_last", [False, True])
@pytest.mark.parametrize("kind", ["affine", "clamped"])
@pytest.mark.parametrize(("gpus", "runtimes", "load"), [(50, 8, 0.5), (50, 8, 0.9), (120, 10, 0.7)])
def test_gurobi_finds_nothing_better_at_scale(kind: str, gpus: int, runtimes: int, load: float, cap_last: bool) -> None:
    pytest.importorskip("gurobipy")
    problem = cluster(5, gpus, runtimes, load, kind, cap_last)
    exact, asked = allocate(problem), allocate(problem, "gurobi")
    check(problem, exact)
    assert exact.feasible == asked.feasible
    assert exact.objective == pytest.approx(asked.objective, rel=1e-6)
    assert exact.objective <= asked.objective * (1 + 1e-12)


def test_a_missing_gurobi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    with pytest.raises(UnsupportedError, match="needs the package gurobipy"):
        allocate(small(1, False), "gurobi")


def test_a_licence_that_is_too_small_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    gurobipy = pytest.importorskip("gurobipy")

    def refuse(self: object) -> None:
        raise gurobipy.GurobiError(10010, "Model too large for size-limited license")

    monkeypatch.setattr(gurobipy.Model, "optimize", refuse)
    with pytest.raises(UnsupportedError, match="size-limited"):
        allocate(small(1, False), "gurobi")


def test_pruning_by_lower_bounds_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from shapeshift.polymorph.policy import allocate_exact

    problems = [cluster(seed, 60, 7, load, kind) for seed, load, kind in itertools.product((1, 2), (0.3, 0.8), KINDS)]
    quick = [allocate(problem).objective for problem in problems]
    monkeypatch.setattr(allocate_exact, "_MARGINS", ())
    assert [allocate(problem).objective for problem in problems] == pytest.approx(quick, rel=1e-12)


@pytest.mark.parametrize("algorithm", ["exact", "gurobi"])
def test_demand_that_does_not_fit_is_scaled(algorithm: str) -> None:
    if algorithm == "gurobi":
        pytest.importorskip("gurobipy")
    problem = cluster(2, 20, 4, 3.0)
    found = allocate(problem, algorithm)
    assert not found.feasible
    needed = sum(q / m for q, m in zip(problem.demand, problem.capacity, strict=True))
    assert found.theta == pytest.approx(19 / needed)
    check(problem, found)
    fitting = Problem(20, tuple(found.theta * q for q in problem.demand), problem.capacity, problem.curves)
    assert allocate(fitting).counts == found.counts


def test_one_gpu_goes_to_the_last_runtime() -> None:
    assert allocate(Problem(1, (500.0, 3.0), (10.0, 5.0), (Affine(1.0), Affine(2.0)))).counts == (0, 1)
    assert allocate(Problem(1, (7.0,), (10.0,), (Affine(1.0),))).counts == (1,)


def test_the_last_runtime_alone_can_be_overloaded() -> None:
    problem = Problem(2, (14.0, 9.0), (10.0, 5.0), (Affine(1.0), Affine(2.0)))
    assert allocate(problem).feasible
    capped = allocate(Problem(2, problem.demand, problem.capacity, problem.curves, cap_last=True))
    assert not capped.feasible
    assert capped.theta == 1.0
    assert capped.counts == allocate(problem).counts


def test_the_cap_moves_gpus_to_the_last_runtime() -> None:
    capped = cluster(1, 40, 8, 0.8, cap_last=True)
    free = Problem(40, capped.demand, capped.capacity, capped.curves)
    assert objective(free, allocate(free).counts)[1] > allocate(free).counts[-1] * free.capacity[-1]
    found = allocate(capped)
    assert found.feasible
    assert objective(free, found.counts)[1] <= found.counts[-1] * free.capacity[-1]


def test_the_surplus_goes_to_the_longest() -> None:
    curves = (Affine(1.0), Affine(2.0), Affine(3.0))
    assert allocate(Problem(7, (0.0, 0.0, 0.0), (9.0, 9.0, 9.0), curves)).counts == (0, 0, 7)
    assert allocate(Problem(7, (0.0, 12.0, 0.0), (9.0, 9.0, 9.0), (Clamped(1.0),) * 3)).counts[0] == 0
    # Below one request an instance, a clamped curve gains nothing from more instances.
    assert allocate(Problem(9, (2.0, 3.0, 1.0), (9.0, 9.0, 9.0), tuple(map(Clamped, (1.0, 2.0, 3.0))))).counts == (
        2,
        3,
        4,
    )


def test_even_and_global() -> None:
    problem = cluster(1, 43, 8, 0.6)
    even = allocate(problem, "even")
    assert even.counts == (5, 5, 5, 5, 5, 5, 5, 8)
    assert even.feasible == problem.met_by(even.counts)
    assert even.objective == pytest.approx(objective(problem, even.counts)[0])
    assert allocate(Problem(2, (1.0,) * 3, (5.0,) * 3, (Affine(1.0),) * 3), "even").counts == (0, 0, 2)
    assert allocate(problem, "global").counts == allocate(problem).counts


def test_even_reports_a_lower_bound_that_it_misses() -> None:
    problem = Problem(4, (30.0, 1.0), (10.0, 10.0), (Affine(1.0), Affine(1.0)))
    assert allocate(problem).counts == (3, 1)
    assert not allocate(problem, "even").feasible


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gpus": 0}, "gpus"),
        ({"capacity": (5.0, 0.5)}, "capacity"),
        ({"capacity": (5.0,)}, "capacity"),
        ({"curves": (Affine(1.0),)}, "curves"),
        ({"demand": (-1.0, 1.0)}, "demand"),
        ({"demand": (math.nan, 1.0)}, "demand"),
        ({"demand": (), "capacity": (), "curves": ()}, "demand"),
    ],
)
def test_invalid_problems_are_refused(change: dict[str, object], named: str) -> None:
    sound = {"gpus": 3, "demand": (1.0, 1.0), "capacity": (5.0, 5.0), "curves": (Affine(1.0), Affine(2.0))}
    with pytest.raises(ValueError, match=f"^{named}: got"):
        Problem(**(sound | change))  # type: ignore[arg-type]


def test_a_capacity_beyond_all_demand() -> None:
    problem = Problem(3, (4.0, 5.0), (1e300, 1e300), (Affine(1.0), Affine(2.0)))
    assert allocate(problem).objective == pytest.approx(brute_force(problem))


def test_latencies_beyond_a_float_are_refused() -> None:
    with pytest.raises(ValueError, match="too large"), np.errstate(over="ignore"):
        allocate(Problem(2, (1e10, 1e10), (1e10, 1e10), (Affine(1e308), Affine(1e308))))


def test_compiles_without_a_writable_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    real = jit.numba.njit

    def njit(signature: str, cache: bool = False, **options: Any) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(signature, **options)

    monkeypatch.setattr(jit.numba, "njit", njit)
    assert jit.njit("i8(i8)")(lambda x: x + 1)(3) == 4
