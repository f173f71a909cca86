"""The simulated cluster against queues with known results."""

from __future__ import annotations

import numpy as np
import pytest

from shapeshift.simulate.polymorph import run
from shapeshift.simulate.scenario import Model, Scheme
from shapeshift.workloads import arrivals, lengths
from shapeshift.workloads.lengths import drifting

ONE = Model((512,), (10.0,), 100.0)
TWO = Model((128, 512), (10.0, 40.0), 400.0)


def fixed(count: int, tokens: int = 100) -> np.ndarray:
    return np.full(count, tokens, np.int64)


def test_simultaneous_requests_are_served_in_sequence() -> None:
    got = run(ONE, 1, np.zeros(4), fixed(4), Scheme())
    assert got.latency_ms == pytest.approx([10.0, 20.0, 30.0, 40.0])
    got = run(ONE, 2, np.zeros(4), fixed(4), Scheme())
    assert got.latency_ms == pytest.approx([10.0, 10.0, 20.0, 20.0])


def test_a_lone_request_takes_its_service_time() -> None:
    at_s = np.arange(20) * 1.0
    tokens = np.where(np.arange(20) % 2, 500, 50).astype(np.int64)
    got = run(TWO, 2, at_s, tokens, Scheme(allocation="even"))
    assert got.latency_ms == pytest.approx(np.where(np.arange(20) % 2, 40.0, 10.0))


def test_one_instance_matches_the_md1_formula() -> None:
    at_s = arrivals.poisson(50.0, 2000.0, np.random.default_rng(1))
    got = run(ONE, 1, at_s, fixed(len(at_s)), Scheme())
    load = 0.5
    assert got.latency_ms.mean() == pytest.approx(10.0 * (1 + load / (2 * (1 - load))), rel=0.03)


def test_a_dynamic_runtime_uses_its_table() -> None:
    dynamic = Model((512,), (40.0,), 400.0).single([0.1 * tokens for tokens in range(513)])
    got = run(dynamic, 1, np.array([0.0, 1.0]), np.array([30, 500]), Scheme())
    assert got.latency_ms == pytest.approx([3.0, 50.0])


def test_allocation_follows_the_lengths() -> None:
    at_s = arrivals.poisson(100.0, 60.0, np.random.default_rng(2))
    tokens = np.where(at_s < 30.0, 100, 500).astype(np.int64)
    got = run(TWO, 8, at_s, tokens, Scheme(period_s=5.0, dispatch="multilevel"))
    assert all(sum(counts) == 8 for _, counts in got.counts)
    (_, first), (_, last) = got.counts[1], got.counts[-1]
    assert first[0] > first[1]
    assert last[1] > last[0]
    fixed_counts = run(TWO, 8, at_s, tokens, Scheme(allocation="even", period_s=5.0, dispatch="multilevel"))
    assert len(fixed_counts.counts) == 1
    late = at_s > 40.0
    assert got.latency_ms[late].mean() < fixed_counts.latency_ms[late].mean()


@pytest.mark.parametrize("scaling", ["target", "headroom"])
def test_workers_come_and_go_with_the_load(scaling: str) -> None:
    rng = np.random.default_rng(3)
    busy = arrivals.poisson(400.0, 100.0, rng)
    quiet = 100.0 + arrivals.poisson(10.0, 300.0, rng)
    at_s = np.concatenate([busy, quiet])
    scheme = Scheme(scaling=scaling, period_s=20.0, min_workers=1, max_workers=12)
    got = run(ONE, 2, at_s, fixed(len(at_s)), scheme)
    sizes = [(at, sum(counts)) for at, counts in got.counts]
    assert max(size for at, size in sizes if at <= 110.0) > 4
    assert sizes[-1][1] < max(size for _, size in sizes)
    assert 1.0 <= got.mean_workers <= 12.0
    assert got.latency_ms[-100:].mean() < 20.0


def test_every_scheme_serves_all_requests() -> None:
    rng = np.random.default_rng(4)
    at_s = arrivals.mmpp(60.0, 60.0, rng)
    tokens = drifting(lengths.long(), at_s, 0.5, 30.0, rng)
    for allocation in ("even", "global", "exact"):
        for dispatch in ("earliest_finish", "multilevel", "intra_group", "inter_group", "bin_packing"):
            got = run(TWO, 6, at_s, tokens, Scheme(allocation, dispatch=dispatch, period_s=5.0, scaling="target"))
            assert (got.latency_ms >= 10.0 - 1e-9).all(), (allocation, dispatch)


def test_no_requests_at_all() -> None:
    got = run(TWO, 3, np.zeros(0), np.zeros(0, np.int64), Scheme())
    assert len(got.latency_ms) == 0
    assert got.mean_workers == 0.0
