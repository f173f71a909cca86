"""The simulated front against queues with known results, and its sidecar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shapeshift.simulate import profile
from shapeshift.simulate.planner import Pace, Planner, Served
from shapeshift.simulate.polymorph import OUTCOMES, SERVED
from shapeshift.workloads import arrivals, lengths
from shapeshift.workloads.lengths import drifting
from shapeshift.workloads.trace import Trace

ONE, TWO = {512: 10.0}, {128: 10.0, 512: 40.0}


def simulate(
    bins: dict[int, float],
    workers: int,
    trace: Trace,
    pace: Pace | None = None,
    nodes: int = 1,
    packing: bool = False,
    **parameters: Any,
) -> Served:
    """Serve a trace by engines that take so many ms in each bin."""
    listed = [
        {"tokens": edge, "rows": 8 if packing else 1, "latency": [[edge, ms, ms, ms]]} for edge, ms in bins.items()
    ]
    engines = profile.engines({"engines": listed}, [*bins], packing=packing)
    stated = {"placement": "partitioned", "slo_ms": 10 * max(bins.values()), "workers": workers, **parameters}
    front = profile.front(stated, engines, [*bins], profile.weights([*bins], trace.length), nodes)
    return Planner(front, engines, trace, pace).run()


def at(times: Sequence[float], tokens: int | Sequence[int] = 100, **columns: object) -> Trace:
    length = np.full(len(times), tokens) if isinstance(tokens, int) else np.array(tokens)
    return Trace(np.array(times, float), length.astype(np.int64), **columns)  # type: ignore[arg-type]


def poisson(rate: float, seconds: float, seed: int = 1, tokens: int = 100) -> Trace:
    times = arrivals.poisson(rate, seconds, np.random.default_rng(seed))
    return at(times.tolist(), tokens)


def test_simultaneous_requests_are_served_in_sequence() -> None:
    assert simulate(ONE, 1, at([0.0] * 4)).latency_ms == pytest.approx([10.0, 20.0, 30.0, 40.0])
    assert simulate(ONE, 2, at([0.0] * 4)).latency_ms == pytest.approx([10.0, 10.0, 20.0, 20.0])
    assert simulate(ONE, 2, at([0.0]), Pace(overhead_ms=0.8)).latency_ms == pytest.approx([10.8])


def test_a_lone_request_takes_its_service_time() -> None:
    trace = at([*range(20)], [500 if second % 2 else 50 for second in range(20)])
    served = simulate(TWO, 2, trace, allocation="even")
    assert served.latency_ms == pytest.approx([40.0 if second % 2 else 10.0 for second in range(20)])


def test_one_instance_matches_the_md1_formula() -> None:
    served = simulate(ONE, 1, poisson(50.0, 800.0))
    load = 0.5
    assert served.latency_ms.mean() == pytest.approx(10.0 * (1 + load / (2 * (1 - load))), rel=0.03)


def test_a_dynamic_engine_takes_its_time_for_the_length() -> None:
    engines = profile.engines({"lengths": [1, 512], "latency_ms": [0.1, 51.2]}, (), packing=False)
    stated = {"placement": "resident", "workers": 1}
    front = profile.front(stated, engines, (), ())
    assert Planner(front, engines, at([0.0, 1.0], [30, 500])).run().latency_ms == pytest.approx([3.0, 50.0])


def test_engines_are_chosen_by_their_best_times_and_take_their_median_ones() -> None:
    any_length = {"tokens": None, "rows": None, "latency": [[100, 14.0, 14.0, 7.0], [200, 30.0, 30.0, 20.0]]}
    static = {"tokens": 100, "rows": 1, "latency": [[100, 9.0, 9.0, 8.0]]}
    engines = profile.engines({"engines": [any_length, static]}, [100, 200], packing=False)
    trace = at([0.0, 1.0, 2.0], [100, 60, 200])
    for placement, taken in (("resident", [14.0, 14.0, 30.0]), ("partitioned", [9.0, 9.0, 30.0])):
        front = profile.front({"placement": placement, "workers": 2, "slo_ms": 90}, engines, [100, 200], [1.0, 1.0])
        assert Planner(front, engines, trace).run().latency_ms == pytest.approx(taken), placement


def test_calls_take_times_of_the_profiles_median_and_p99() -> None:
    profiled = {
        "engines": [{"tokens": None, "rows": None, "latency": [[100, 14.0, 28.0, 7.0], [200, 30.0, 30.0, 20.0]]}]
    }
    engines = profile.engines(profiled, [200], packing=False)
    front = profile.front({"placement": "inline", "engine_threads": 3}, engines, [200], [1.0])
    trace = at([float(second) for second in range(4000)], [100, 200] * 2000)
    took_ms = Planner(front, engines, trace).run().latency_ms
    assert np.percentile(took_ms[::2], [50, 99]) == pytest.approx([14.0, 28.0], rel=0.1)
    assert took_ms[1::2] == pytest.approx(30.0), "no spread where there is none in the profile"
    assert (Planner(front, engines, trace).run().latency_ms == took_ms).all()


@pytest.mark.parametrize(("placement", "last_ms"), [("inline", [19.0, 29.0]), ("resident", [29.0, 29.0])])
def test_workers_that_hold_all_bins_share_rows_and_calls(placement: str, last_ms: list[float]) -> None:
    listed = [{"tokens": 512, "rows": 8, "latency": [[512, 10.0, 10.0, 10.0]]}]
    engines = profile.engines({"engines": listed}, [512])
    stated = {"placement": placement, "workers": 2, "engine_threads": 2}
    front = profile.front(stated, engines, [512], [1.0])
    served = Planner(front, engines, at([0.0, 0.0, 0.001, 0.001, 0.001, 0.001])).run()
    # A thread takes its share of what waits when it is free: two rows, then one. A worker has its next call before.
    assert served.latency_ms == pytest.approx([10.0, 10.0, 19.0, 19.0, *last_ms])


def test_texts_of_a_bin_share_a_call_up_to_its_tokens() -> None:
    served = simulate({512: 10.0}, 1, at([0.0] * 8), packing=True)
    # The first two calls begin before the others have come.
    assert served.latency_ms == pytest.approx([10.0, 20.0] + [30.0] * 5 + [40.0])


def test_a_full_queue_and_late_texts_have_their_outcomes() -> None:
    trace = at([0.0] * 6, latency_ms=np.array([0.0, 0.0, 5.0, 0.0, 0.0, 0.0]))
    served = simulate(ONE, 1, trace, queue_rows=2, max_queue_ms=0)
    # One runs, one is in flight behind it, two wait. The third is taken, as nothing waits yet, and is late then.
    assert [OUTCOMES[outcome] for outcome in served.outcome] == [*["served"] * 2, "late", "served", *["refused"] * 2]
    assert np.isnan(served.latency_ms[served.outcome != SERVED]).all()
    tight = simulate(ONE, 1, at([0.0] * 4, latency_ms=np.full(4, 25.0)), max_queue_ms=0)
    # Nothing waits before the third either; the fourth would be answered too late.
    assert [OUTCOMES[outcome] for outcome in tight.outcome] == ["served", "served", "served", "refused"]


def test_the_plan_follows_the_lengths_in_batches_of_moves() -> None:
    rng = np.random.default_rng(2)
    times = arrivals.poisson(340.0, 60.0, rng)
    trace = at(times.tolist(), np.where(times < 30.0, 100, 500).tolist())
    parameters: dict[str, Any] = {"dispatch": "multilevel", "plan_histogram": json.dumps([0.5, 0.5])}
    served = simulate(TWO, 16, trace, Pace(plan_period_s=5.0, change_s=0.2), **parameters)
    assert all(sum(counts) == 16 for _, counts, _ in served.plans)
    (_, first, _), (_, last, _) = served.plans[1], served.plans[-1]
    assert first[0] > first[1] and last[1] > last[0]
    frozen = simulate(TWO, 16, trace, Pace(plan_period_s=0.0), **parameters)
    assert len(frozen.plans) == 1
    late = trace.at_s > 45.0
    assert served.latency_ms[late].mean() < frozen.latency_ms[late].mean()


def test_the_sidecars_gates_hold() -> None:
    few = at([*np.linspace(0, 29, 40).tolist()], 500)
    served = simulate(TWO, 4, few, Pace(plan_period_s=10.0), plan_histogram=json.dumps([0.9, 0.1]))
    reasons = [reason for _, _, reason in served.plans]
    assert "fewer than 50: the plan stays" in reasons[1]
    same = simulate(TWO, 4, poisson(100.0, 30.0), Pace(plan_period_s=10.0))
    assert "stays" in same.plans[1][2] and same.plans[1][1] == same.plans[0][1]


@pytest.mark.parametrize("scaling", ["target", "headroom"])
def test_workers_come_and_go_with_the_load(scaling: str) -> None:
    rng = np.random.default_rng(3)
    busy = arrivals.poisson(400.0, 80.0, rng)
    quiet = 80.0 + arrivals.poisson(10.0, 300.0, rng)
    trace = at(np.concatenate([busy, quiet]).tolist())
    limits: dict[str, Any] = {"min_workers": 1, "max_workers": 12, "max_queue_ms": 0, "queue_rows": 10**6}
    served = simulate(ONE, 2, trace, Pace(20.0, scaling=scaling), **limits)
    assert max(size for at_s, size in served.sizes if at_s <= 90.0) > 4
    assert served.sizes[-1][1] < max(size for _, size in served.sizes)
    assert 1.0 <= served.mean_workers <= 12.0
    assert served.latency_ms[-100:].mean() < 20.0


def test_headroom_adds_workers_to_the_bin_that_is_full() -> None:
    limits: dict[str, Any] = {"max_workers": 8, "allocation": "even", "max_queue_ms": 0, "queue_rows": 10**6}
    served = simulate(TWO, 4, poisson(60.0, 90.0, tokens=500), Pace(0.0, scaling="headroom"), **limits)
    assert served.latency_ms[:1000].max() > 1000.0, "two of four workers take long texts, which need 2.4"
    assert served.latency_ms[-1000:].max() < 1000.0


def test_a_dead_worker_and_a_lost_node_cost_no_text() -> None:
    trace = poisson(150.0, 20.0)
    died = simulate(ONE, 4, trace, Pace(kill_s=5.0), nodes=2)
    whole = simulate(ONE, 4, trace, nodes=2)
    assert (died.outcome == SERVED).all()
    assert died.latency_ms.max() > whole.latency_ms.max()
    left = simulate(ONE, 2, trace, Pace(leave_s=5.0, change_s=0.5), nodes=2, max_workers=4)
    assert (left.outcome == SERVED).all()
    assert "node node1 is lost" in left.plans[1][2]
    assert [size for _, size in left.sizes] == [4, 4] or left.sizes[-1][1] == 4


def test_every_scheme_serves_all_requests() -> None:
    rng = np.random.default_rng(4)
    times = arrivals.mmpp(60.0, 20.0, rng)
    trace = Trace(times, drifting(lengths.long(), times, 0.5, 30.0, rng))
    limits: dict[str, Any] = {"min_workers": 1, "max_workers": 8}
    for allocation in ("even", "global", "exact"):
        for dispatch in ("earliest_finish", "multilevel", "intra_group", "inter_group", "bin_packing"):
            served = simulate(TWO, 6, trace, Pace(5.0), allocation=allocation, dispatch=dispatch, **limits)
            assert (served.latency_ms >= 10.0 - 1e-9).all(), (allocation, dispatch)


def test_no_requests_at_all() -> None:
    served = simulate(TWO, 3, at([]))
    assert len(served.latency_ms) == 0 and served.mean_workers == 0.0
