"""What to do about the workers of a front, and why.

One decision takes three steps: `within_limits` gives the number of workers of the front, `plan.solve` how many of them
hold each bin, and `moves.moves` the actions that lead there. Between plans, `decide_scaling` adds or releases one
worker by the tail latency (Arlo, section 4, resource scaling).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shapeshift.polymorph.policy import autoscale
from shapeshift.sidecar.front_config import ALL_BINS, Front
from shapeshift.sidecar.observe import LENGTHS, Traffic
from shapeshift.sidecar.policy import plan
from shapeshift.sidecar.policy.moves import Action, moves, release_order
from shapeshift.sidecar.policy.spare import in_order

# A period with fewer texts than this says too little about their lengths, and changes no plan.
MIN_TEXTS = 50
# Seconds between two checks of the tail latency.
SCALE_PERIOD_S = 10.0


@dataclass(frozen=True)
class Decision:
    """actions: empty if nothing changes; counts: workers by bin, or one number if workers hold all bins."""

    actions: tuple[Action, ...]
    counts: tuple[int, ...]
    reason: str
    feasible: bool = True
    expected_ms: float | None = None


@dataclass(frozen=True)
class FrontPeriod:
    """One front at the end of a period.

    current: the bin of each of its workers; spare: worker models that can be loaded; models: number of its worker
    models; target: how many workers it should have; 0: as many as now.
    """

    front: Front
    current: Mapping[str, int]
    spare: Sequence[str]
    traffic: Traffic
    models: int
    target: int = 0


def first_plan(front: Front, workers: int, spare: Sequence[str]) -> Decision:
    """The plan for a front without loaded workers: from the configured histogram, at an assumed utilization."""
    if not front.is_binned:
        return Decision(tuple(moves(front, {}, (workers,), spare, {})), (workers,), "placement resident")
    demand = plan.assumed_demand(front, workers)
    solution = plan.solve(front, workers, demand)
    source = f"no traffic yet, by plan_histogram ({plan.format_demand(front, demand)})"
    utilization = f"at {100 * plan.ASSUMED_UTILIZATION:.0f}% utilization"
    return Decision(
        actions=tuple(moves(front, {}, solution.counts, spare, {})),
        counts=solution.counts,
        reason=_join(f"{source} {utilization}", _expected(solution.mean_ms), solution.reason),
        feasible=solution.feasible,
        expected_ms=solution.mean_ms,
    )


def complete_plan(front: Front, current: Mapping[str, int], workers: int, spare: Sequence[str]) -> Decision:
    """Load the workers that an interrupted first plan lacks; the workers `current` (worker: bin) keep their bins."""
    counts: tuple[int, ...] = (workers,)
    if front.is_binned:
        demand = plan.assumed_demand(front, workers)
        counts = plan.solve(front, workers, demand).counts
    loads = tuple(action for action in moves(front, current, counts, spare, {}) if action.kind == "load")
    return Decision(loads, counts, f"{len(current)} of {workers} workers were loaded")


def within_limits(front: Front, workers: int, models: int) -> tuple[int, str]:
    """`workers` within the front's limits and its number of worker models, and what is wrong, if anything."""
    target = min(max(workers, front.min_workers), front.max_workers)
    if models >= target:
        return target, ""
    return models, f"{target} workers are needed, but there are only {models} worker models; run `shapeshift engines`"


def decide_period(period: FrontPeriod) -> Decision:
    """The plan of a front for the next period."""
    front, current = period.front, period.current
    workers, reason = within_limits(front, period.target or len(current), period.models)
    spare = in_order(period.spare, current)
    workers = min(workers, len(current) + len(spare))
    if workers < 1:
        return Decision((), (0,), reason or "no worker can be loaded")
    decision = next_plan(front, current, workers, spare, period.traffic)
    return replace(decision, reason=_join(reason, decision.reason))


def next_plan(
    front: Front,
    current: Mapping[str, int],
    workers: int,
    spare: Sequence[str],
    traffic: Traffic,
) -> Decision:
    """The plan for the next period, from the traffic of the last one. The current plan stays unless another is better.

    current: the bin of each worker.
    """
    if not front.is_binned:
        actions = moves(front, current, (workers,), spare, traffic.outstanding)
        return Decision(tuple(actions), (workers,), _rate(traffic))
    # A bin that `make engines` has removed must change, too; and without the longest bin some texts have no worker.
    must_change = workers != len(current) or any(bin_ not in front.edges for bin_ in current.values())
    must_change |= plan.counts_of(front, current)[-1] == 0
    present = plan.counts_of(front, current)
    fixed = front.settings.allocation in ("even", "global")
    enough = traffic.offered >= MIN_TEXTS
    if not (fixed or enough or must_change):
        return Decision((), present, f"{_too_few(traffic)}: the plan stays")
    if fixed or not enough:
        demand = plan.assumed_demand(front, workers)
        source = "by plan_histogram"
    else:
        demand = _with_backlog(front, traffic, current)
        source = f"{_rate(traffic)} ({plan.format_demand(front, demand)})"
    solution = plan.solve(front, workers, demand)
    before = None if must_change else plan.expected_ms(front, present, demand)
    stays = not must_change and (
        solution.counts == present if fixed else not plan.is_better(front, solution, present, demand)
    )
    if stays:
        reason = _join(f"{source}: {plan.format_counts(front, present)} stays", _expected(before), solution.reason)
        return Decision((), present, reason, solution.feasible, before)
    return Decision(
        actions=tuple(moves(front, current, solution.counts, spare, traffic.outstanding)),
        counts=solution.counts,
        reason=_join(source, _expected(solution.mean_ms, before), solution.reason),
        feasible=solution.feasible,
        expected_ms=solution.mean_ms,
    )


def decide_scaling(
    front: Front,
    traffic: Traffic,
    fast_since_s: float,
    current: Mapping[str, int],
    spare: Sequence[str],
    alive: set[str],
) -> tuple[Action | None, str]:
    """The worker to load or to unload, if any, and why.

    fast_since_s: for how long the front has been fast, see `is_fast`. current: the bin of each worker. spare: worker
    models that can be loaded. alive: workers with a heartbeat. A new worker gets the longest bin. The last worker that
    takes the longest texts is never released, nor is a dead worker: it could not be unloaded.
    """
    tail = tail_ms(traffic)
    if tail is None:
        return None, "the tail latency is unknown: texts wait without answers, or there is no heartbeat"
    workers = release_order(current)
    needed = {worker for worker in workers if worker not in alive} | _only_longest(current)
    outstanding = [sys.maxsize if worker in needed else traffic.outstanding.get(worker, 0) for worker in workers]
    slo_ms = front.settings.slo_ms
    decision = autoscale.decide(tail, slo_ms, fast_since_s, outstanding, front.min_workers, front.max_workers)
    reason = f"p98 {tail:.1f} ms, objective {slo_ms:g} ms, {len(workers)} workers"
    if decision.action == "out":
        if not spare:
            return None, f"{reason}: one more is needed, but there is no further worker model; run `shapeshift engines`"
        return Action("load", spare[0], front.edges[-1] if front.is_binned else ALL_BINS), reason
    if decision.action == "in" and decision.worker is not None:
        worker = workers[decision.worker]
        if worker in needed:
            return None, f"{reason}: one fewer is enough, but none can be released"
        return Action("unload", worker, before=current[worker]), f"{reason}, below half for {fast_since_s:.0f} s"
    return None, reason


def tail_ms(traffic: Traffic) -> float | None:
    """The tail latency for scaling; 0 for an idle front, None if it is unknown."""
    if traffic.p98_ms is not None:
        return traffic.p98_ms
    busy = traffic.waiting or traffic.running or any(traffic.outstanding.values())
    return 0.0 if traffic.live_pids and not busy else None


def is_fast(front: Front, traffic: Traffic) -> bool:
    """Whether the tail latency is so low that one worker fewer could be enough."""
    tail = tail_ms(traffic)
    return tail is not None and tail < autoscale.PAPER.in_share * front.settings.slo_ms


def report_entry(front: Front, decision: Decision) -> dict[str, Any]:
    """The decision as JSON values, for the sidecar's report."""
    binned = front.is_binned and len(decision.counts) == len(front.edges)
    counts = zip(front.edges, decision.counts, strict=True) if binned else ()
    return {
        "workers": sum(decision.counts),
        "counts": {str(edge): count for edge, count in counts},
        "plan": plan.format_counts(front, decision.counts),
        "reason": decision.reason,
        "changes": [str(action) for action in decision.actions],
        "feasible": decision.feasible,
        "expected_ms": decision.expected_ms,
    }


def _with_backlog(front: Front, traffic: Traffic, current: Mapping[str, int]) -> tuple[float, ...]:
    waiting = plan.backlog_demand(front, traffic, current)
    return tuple(texts + more for texts, more in zip(plan.observed_demand(front, traffic), waiting, strict=True))


def _only_longest(current: Mapping[str, int]) -> set[str]:
    """The worker that alone holds the longest bin, if there is only one."""
    longest = ALL_BINS if ALL_BINS in current.values() else max(current.values(), default=ALL_BINS)
    holders = {worker for worker, bin_ in current.items() if bin_ == longest}
    return holders if len(holders) == 1 else set()


def _rate(traffic: Traffic) -> str:
    return f"{traffic.offered / traffic.seconds:.1f} texts/s in {traffic.seconds:.0f} s"


def _too_few(traffic: Traffic) -> str:
    if LENGTHS in traffic.missing:
        return f"no metric {LENGTHS}"
    return f"{traffic.offered:.0f} texts in {traffic.seconds:.0f} s, fewer than {MIN_TEXTS}"


def _expected(mean_ms: float | None, before: float | None = None) -> str:
    if mean_ms is None:
        return ""
    return f"expected mean {mean_ms:.1f} ms" + (f" (before: {before:.1f})" if before is not None else "")


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
