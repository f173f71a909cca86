"""What to do about one front's workers, and why: the first plan, and the plan of each further period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapeshift.scheduler import plan
from shapeshift.scheduler.front import Front
from shapeshift.scheduler.moves import Action, moves
from shapeshift.scheduler.observe import LENGTHS, Load
from shapeshift.scheduler.settings import SchedulerSettings


@dataclass(frozen=True)
class Decision:
    """actions: none where all stays as it is; counts: workers by bin, or one number where they hold all bins."""

    actions: tuple[Action, ...]
    counts: tuple[int, ...]
    reason: str
    feasible: bool = True
    expected_ms: float | None = None


def room(front: Front, wanted: int, models: int) -> tuple[int, str]:
    """`wanted` workers within the front's bounds and the worker models that exist; and what is wrong, if anything."""
    within = min(max(wanted, front.least), front.most)
    if models >= within:
        return within, ""
    return models, f"{within} workers are wanted, but there are {models} worker models; run `make engines`"


def first(front: Front, workers: int, spare: Sequence[str], settings: SchedulerSettings) -> Decision:
    """The plan for a front of which no worker is loaded: by the configured histogram, at an assumed load."""
    if not front.is_binned:
        return Decision(tuple(moves(front, {}, (workers,), spare, {})), (workers,), "placement resident")
    wanted = plan.assumed_demand(front, workers, settings.assumed_load)
    found = plan.solve(front, workers, wanted)
    reason = f"no traffic yet, by plan_histogram ({plan.shares(front, wanted)})"
    return Decision(
        actions=tuple(moves(front, {}, found.counts, spare, {})),
        counts=found.counts,
        reason=_joined(f"{reason} at {100 * settings.assumed_load:.0f}% load", _expected(found.mean_ms), found.reason),
        feasible=found.feasible,
        expected_ms=found.mean_ms,
    )


def complete(
    front: Front, have: Mapping[str, int], workers: int, spare: Sequence[str], settings: SchedulerSettings
) -> Decision:
    """Fill up a plan that was cut short: only loads, so that `have` stays as it is."""
    if front.is_binned:
        wanted = plan.assumed_demand(front, workers, settings.assumed_load)
        counts: tuple[int, ...] = plan.solve(front, workers, wanted).counts
    else:
        counts = (workers,)
    loads = tuple(action for action in moves(front, have, counts, spare, {}) if action.kind == "load")
    return Decision(loads, counts, f"{len(have)} of {workers} workers were loaded")


def again(
    front: Front,
    have: Mapping[str, int],
    workers: int,
    spare: Sequence[str],
    load: Load,
    settings: SchedulerSettings,
) -> Decision:
    """The plan for the next period, from what came in the last one. It stays unless another is clearly better."""
    if not front.is_binned:
        counts: tuple[int, ...] = (workers,)
        return _moved(front, have, counts, spare, load, _seen(load))
    # Also where `make engines` has taken a bin away.
    must_change = workers != len(have) or any(bin_ not in front.edges for bin_ in have.values())
    present = plan.counts_of(front, have)
    fixed = front.settings.allocation in ("even", "global")
    enough = load.offered >= settings.least_texts
    if not (fixed or enough or must_change):
        return Decision((), present, f"{_too_few(load, settings)}: the plan stays")
    by_histogram = fixed or not enough
    wanted = (
        plan.assumed_demand(front, workers, settings.assumed_load) if by_histogram else _with_backlog(front, load, have)
    )
    found = plan.solve(front, workers, wanted)
    seen = "by plan_histogram" if by_histogram else f"{_seen(load)} ({plan.shares(front, wanted)})"
    if not must_change:
        better = (
            found.counts != present if fixed else plan.is_better(front, found, present, wanted, settings.least_gain)
        )
        if not better:
            now = plan.expected_ms(front, present, wanted)
            reason = _joined(f"{seen}: {plan.in_words(front, present)} stays", _expected(now), found.reason)
            return Decision((), present, reason, found.feasible, now)
    before = None if must_change else plan.expected_ms(front, present, wanted)
    reason = _joined(seen, _expected(found.mean_ms, before), found.reason)
    return _moved(front, have, found.counts, spare, load, reason, found.feasible, found.mean_ms)


def asked(front: Front, pool_workers: int, load: Load | None, settings: SchedulerSettings) -> float:
    """Workers' time that the front's demand takes, served as the solution for the whole pool would; for pools."""
    if not front.edges:
        return 0.0
    if load is None:
        wanted = plan.assumed_demand(front, front.settings.workers, settings.assumed_load)
    else:
        wanted = plan.demand(front, load)
    return plan.solve(front, pool_workers, wanted).asked if sum(wanted) > 0 else 0.0


def _moved(
    front: Front,
    have: Mapping[str, int],
    counts: tuple[int, ...],
    spare: Sequence[str],
    load: Load,
    reason: str,
    feasible: bool = True,
    expected: float | None = None,
) -> Decision:
    return Decision(tuple(moves(front, have, counts, spare, load.outstanding)), counts, reason, feasible, expected)


def _with_backlog(front: Front, load: Load, have: Mapping[str, int]) -> tuple[float, ...]:
    waiting = plan.backlog(front, load, have)
    return tuple(texts + more for texts, more in zip(plan.demand(front, load), waiting, strict=True))


def _seen(load: Load) -> str:
    return f"{load.offered / load.seconds:.1f} texts/s in {load.seconds:.0f} s"


def _too_few(load: Load, settings: SchedulerSettings) -> str:
    if LENGTHS in load.absent:
        return f"no metric {LENGTHS}"
    return f"{load.offered:.0f} texts in {load.seconds:.0f} s, fewer than {settings.least_texts}"


def _expected(mean_ms: float | None, before: float | None = None) -> str:
    if mean_ms is None:
        return ""
    return f"expected mean {mean_ms:.1f} ms" + (f" (before: {before:.1f})" if before is not None else "")


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
