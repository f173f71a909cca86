"""Fronts that share a pool of workers, and those that have their own: who gets how many, and what each does then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shapeshift.scheduler import decide, plan, pools
from shapeshift.scheduler.decide import Decision
from shapeshift.scheduler.fleet import Fleet
from shapeshift.scheduler.front import Front
from shapeshift.scheduler.observe import Load
from shapeshift.scheduler.settings import SchedulerSettings


@dataclass(frozen=True)
class Member:
    """One front at the end of a period: the bins of its workers, further workers, what came in, its worker models."""

    front: Front
    have: Mapping[str, int]
    spare: Sequence[str]
    load: Load
    models: int


def groups(fronts: Iterable[Front]) -> list[list[Front]]:
    """The fronts that have workers, those of one pool together."""
    found: dict[tuple[str, str], list[Front]] = {}
    for front in fronts:
        if front.has_workers:
            pool = front.settings.worker_pool
            found.setdefault(("pool", pool) if pool else ("front", front.name), []).append(front)
    return list(found.values())


def first_shares(group: Sequence[Front], fleet: Fleet) -> dict[str, int]:
    """Workers of each front before any traffic: as configured, or the pool in proportion to that."""
    wanted = [front.settings.workers for front in group]
    if not group[0].settings.worker_pool:
        return {front.name: count for front, count in zip(group, wanted, strict=True)}
    most = [min(front.most, len(fleet.workers[front.name])) for front in group]
    least = [min(front.least, limit) for front, limit in zip(group, most, strict=True)]
    split = pools.split(_size(group), wanted, least, most)
    return {front.name: count for front, count in zip(group, split, strict=True)}


def spare(front: Front, group: Sequence[Front], fleet: Fleet) -> list[str]:
    """Worker models of the front that can be loaded; first those whose number no other front of the group uses."""
    used = {
        other.worker_number(worker.name)
        for other in group
        if other.name != front.name
        for worker in fleet.workers[other.name]
        if not worker.is_at_rest
    }
    free = [worker.name for worker in fleet.workers[front.name] if worker.is_at_rest]
    return sorted(free, key=lambda model: front.worker_number(model) in used)


def decide_all(members: Sequence[Member], settings: SchedulerSettings) -> list[tuple[Front, Decision]]:
    """Each front's decision; those that give workers up come before those that get them."""
    if not members[0].front.settings.worker_pool:
        (member,) = members
        workers, problem = decide.room(member.front, len(member.have), member.models)
        return [(member.front, _again(member, workers, settings, problem))]
    most = [min(member.front.most, member.models) for member in members]
    least = [min(member.front.least, limit) for member, limit in zip(members, most, strict=True)]
    have = [len(member.have) for member in members]
    size = _size([member.front for member in members])
    asked = [decide.asked(member.front, size, member.load if member.have else None, settings) for member in members]
    few = sum(member.load.offered for member in members) < settings.least_texts
    stays = few and all(have) and sum(have) <= size
    shares = have if stays else pools.split(size, asked, least, most, have)
    decisions = []
    for member, share, time_asked in zip(members, shares, asked, strict=True):
        total = f"{time_asked:.1f} of {sum(asked):.1f} workers' time asked for"
        reason = f"pool {member.front.settings.worker_pool}: {total}, {share} of {size} workers"
        decisions.append((share - len(member.have), member.front, _again(member, share, settings, reason)))
    return [(front, decision) for _, front, decision in sorted(decisions, key=lambda entry: entry[0])]


def described(front: Front, decision: Decision) -> dict[str, Any]:
    """The decision for the report."""
    binned = front.is_binned and len(decision.counts) == len(front.edges)
    return {
        "workers": sum(decision.counts),
        "counts": {str(edge): count for edge, count in zip(front.edges, decision.counts, strict=True)}
        if binned
        else {},
        "plan": plan.in_words(front, decision.counts),
        "reason": decision.reason,
        "changes": [str(action) for action in decision.actions],
        "feasible": decision.feasible,
        "expected_ms": decision.expected_ms,
    }


def _again(member: Member, workers: int, settings: SchedulerSettings, reason: str) -> Decision:
    workers = min(workers, len(member.have) + len(member.spare))
    if workers < 1:
        return Decision((), (0,), reason or "no worker can be loaded")
    decision = decide.again(member.front, member.have, workers, member.spare, member.load, settings)
    return replace(decision, reason=f"{reason}; {decision.reason}" if reason else decision.reason)


def _size(group: Sequence[Front]) -> int:
    """The pool's workers; where the fronts disagree, the least that any of them states."""
    return min(front.settings.pool_workers for front in group)
