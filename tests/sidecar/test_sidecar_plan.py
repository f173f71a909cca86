"""From traffic to the bins of the workers."""

from __future__ import annotations

import itertools
import random

import pytest

from shapeshift.sidecar.observe import LENGTHS, Traffic
from shapeshift.sidecar.policy import decide, plan
from tests.sidecar.fakes import EDGES, SERVICE_MS, front


def names(count: int, start: int = 0) -> list[str]:
    return [f"enc_w{number:02d}" for number in range(start, start + count)]


def traffic(seconds: float = 100.0, **texts: float) -> Traffic:
    """Traffic with texts by length, as `t32=100`."""
    return Traffic(seconds, {float(name[1:]): count for name, count in texts.items()})


def test_demand_is_counted_by_bin_within_the_objective() -> None:
    seen = Traffic(120.0, {8.0: 100.0, 32.0: 20.0, 40.0: 60.0, 512.0: 12.0, 520.0: 6.0, float("inf"): 6.0})
    assert plan.observed_demand(front(), seen) == pytest.approx((0.3, 0.15, 0.06))


def test_waiting_texts_count_as_demand_of_their_workers_bin() -> None:
    have = {"enc_w00": 32, "enc_w01": 32, "enc_w02": 512}
    seen = Traffic(60.0, outstanding={"enc_w00": 5, "enc_w01": 0, "enc_w02": 9, "enc_w09": 100})
    one = front()
    per_text = 2 * plan.horizon_ms(one) / 60e3
    assert plan.backlog_demand(one, seen, have) == pytest.approx((4 * per_text, 0.0, 8 * per_text))
    assert plan.backlog_demand(front(curve="clamped"), seen, have) == (0.0, 0.0, 0.0)


def test_the_horizon_is_at_least_the_longest_service_time() -> None:
    tight = front(slo_ms=50)
    assert plan.horizon_ms(tight) == SERVICE_MS[-1]
    found = plan.solve(tight, 4, plan.observed_demand(tight, traffic(t32=1000, t512=100)))
    assert "takes longer than slo_ms (50)" in found.reason


@pytest.mark.parametrize("curve", ["md1", "clamped"])
@pytest.mark.parametrize("seed", range(12))
def test_the_solution_is_the_best_of_all_counts(seed: int, curve: str) -> None:
    source = random.Random(seed)
    one = front(curve=curve, slo_ms=source.choice([150, 300, 1000]))
    workers = source.randint(2, 7)
    wanted = plan.assumed_demand(one, workers, source.uniform(0.2, 0.9))
    stated = plan.allocation_problem(one, workers, wanted)
    counts = [found for found in itertools.product(range(workers + 1), repeat=3) if stated.met_by(found)]
    found = plan.solve(one, workers, wanted)
    assert sum(found.counts) == workers
    if counts:
        assert found.mean_ms == pytest.approx(min(map(stated.objective, counts)) / sum(wanted))
    else:
        assert not found.feasible


@pytest.mark.parametrize("seed", range(20))
def test_any_traffic_gives_a_plan_for_exactly_the_workers_there_are(seed: int) -> None:
    source = random.Random(seed)
    one = front(
        slo_ms=source.choice([20, 150, 2000]),
        curve=source.choice(["md1", "clamped"]),
        allocation=source.choice(["exact", "even", "global"]),
    )
    workers = source.randint(1, 12)
    have = {name: source.choice([*EDGES, 0, 48]) for name in names(source.randint(1, 12))}
    spare = names(12, start=20)
    seen = Traffic(source.uniform(1, 200), {float(edge): source.choice([0, 3, 10.0**6]) for edge in EDGES})
    decision = decide.next_plan(one, have, workers, spare, seen)
    for action in decision.actions:
        if action.kind == "unload":
            del have[action.worker]
        else:
            have[action.worker] = action.bin
    assert len(have) == workers or not decision.actions
    assert decision.reason
    if decision.actions:
        assert plan.counts_of(one, have) == decision.counts
        assert set(have.values()) <= set(EDGES)
        assert 512 in have.values() or one.settings.allocation == "even"


def test_the_first_plan_follows_the_histogram() -> None:
    decision = decide.first_plan(front(plan_histogram="[96, 3, 1]"), 6, names(6))
    long_ones = decide.first_plan(front(plan_histogram="[1, 3, 96]"), 6, names(6))
    assert decision.counts[0] > long_ones.counts[0]
    assert long_ones.counts == (0, 0, 6)
    assert "plan_histogram (32: 96%, 128: 3%, 512: 1%)" in decision.reason
    assert {action.kind for action in decision.actions} == {"load"}
    assert [action.worker for action in decision.actions] == names(6)
    assert [action.bin for action in decision.actions] == sorted((a.bin for a in decision.actions), reverse=True)


def test_the_assumed_demand_can_be_served() -> None:
    for weights in ("[8, 1, 1]", "[1, 1, 1]", "[100, 1, 1]"):
        one = front(plan_histogram=weights)
        found = plan.solve(one, 4, plan.assumed_demand(one, 4, 0.7))
        assert found.feasible
        assert found.mean_ms is not None
        assert found.mean_ms < one.settings.slo_ms


def test_other_traffic_changes_bins_and_gives_the_reason() -> None:
    have = dict(zip(names(4), (512, 512, 512, 32), strict=True))
    decision = decide.next_plan(front(), have, 4, [], traffic(t32=40_000, t512=100))
    assert decision.counts[0] >= 2
    assert all(action.kind == "change" for action in decision.actions)
    assert "401.0 texts/s in 100 s (32: 100%)" in decision.reason
    assert "(before: " in decision.reason
    assert decision.expected_ms is not None


def test_the_same_traffic_changes_nothing() -> None:
    have = dict(zip(names(4), (512, 512, 512, 32), strict=True))
    seen = traffic(t32=40_000, t512=100)
    first = decide.next_plan(front(), have, 4, [], seen)
    have |= {action.worker: action.bin for action in first.actions}
    again = decide.next_plan(front(), have, 4, [], seen)
    assert again.actions == ()
    assert "stays" in again.reason


def test_too_little_traffic_changes_nothing() -> None:
    have = dict(zip(names(4), (512, 512, 512, 32), strict=True))
    decision = decide.next_plan(front(), have, 4, [], traffic(t32=49))
    assert decision.actions == ()
    assert "49 texts in 100 s, fewer than 50: the plan stays" in decision.reason


def test_a_missing_metric_is_reported() -> None:
    decision = decide.next_plan(front(), {"enc_w00": 512}, 1, [], Traffic(100.0, missing=(LENGTHS,)))
    assert decision.actions == ()
    assert f"no metric {LENGTHS}" in decision.reason


def test_demand_beyond_the_workers_is_reported() -> None:
    decision = decide.next_plan(front(), dict.fromkeys(names(4), 512), 4, [], traffic(t512=100_000))
    assert not decision.feasible
    assert "4 workers serve" in decision.reason
    assert "% of the demand within 300 ms" in decision.reason


def test_fixed_allocations_ignore_traffic() -> None:
    have = dict(zip(names(6), (512, 512, 512, 512, 512, 32), strict=True))
    even = decide.next_plan(front(allocation="even"), have, 6, [], traffic(t32=10_000))
    assert even.counts == (2, 2, 2)
    everywhere = front(allocation="global", plan_histogram="[96, 3, 1]")
    first = decide.first_plan(everywhere, 6, names(6))
    loaded = {action.worker: action.bin for action in first.actions}
    assert decide.next_plan(everywhere, loaded, 6, [], traffic(t512=1000)).actions == ()


def test_a_removed_bin_is_replaced() -> None:
    decision = decide.next_plan(front(), {"enc_w00": 512, "enc_w01": 96}, 2, [], traffic(t32=10))
    assert [action.worker for action in decision.actions] in (["enc_w01"], ["enc_w00", "enc_w01"])


def test_an_interrupted_plan_is_completed() -> None:
    have = {"enc_w00": 512, "enc_w01": 32}
    decision = decide.complete_plan(front(), have, 4, names(4, start=2))
    assert [(action.kind, action.worker) for action in decision.actions] == [("load", "enc_w02"), ("load", "enc_w03")]
    assert "2 of 4" in decision.reason


def test_workers_with_all_bins_are_only_counted() -> None:
    one = front(placement="resident")
    assert decide.first_plan(one, 3, names(3)).counts == (3,)
    have = dict.fromkeys(names(3), 0)
    assert decide.next_plan(one, have, 3, [], traffic(t32=1000)).actions == ()
    fewer = decide.next_plan(one, have, 2, [], traffic(t32=1000))
    assert [action.kind for action in fewer.actions] == ["unload"]


def test_missing_worker_models_are_reported() -> None:
    assert decide.within_limits(front(), 4, 6) == (4, "")
    workers, problem = decide.within_limits(front(), 4, 2)
    assert workers == 2
    assert "4 workers are needed, but there are only 2 worker models; run `shapeshift engines`" in problem
