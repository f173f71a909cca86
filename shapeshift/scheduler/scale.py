"""One worker more or fewer, by the tail latency (Arlo, section 4, resource scaling)."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from shapeshift.polymorph.autoscale import PAPER, decide
from shapeshift.scheduler.front import ALL, Front
from shapeshift.scheduler.moves import Action
from shapeshift.scheduler.observe import Load


def tail_ms(load: Load) -> float | None:
    """The tail latency to scale by; 0 for a front at rest, None where it cannot be known."""
    if load.p98_ms is not None:
        return load.p98_ms
    at_rest = bool(load.live) and not load.waiting and not load.running and not any(load.outstanding.values())
    return 0.0 if at_rest else None


def is_below(front: Front, load: Load) -> bool:
    """Whether the tail latency is so low that a worker could be spared."""
    tail = tail_ms(load)
    return tail is not None and tail < PAPER.in_share * front.settings.slo_ms


def scale(
    front: Front, load: Load, below_since_s: float, have: Mapping[str, int], spare: list[str], alive: set[str]
) -> tuple[Action | None, str]:
    """What to do, if anything, and why.

    have: the bin of each worker; spare: workers that could be loaded; alive: workers that answer. A new worker
    gets the longest bin. The last worker that takes the longest texts is never released, nor is a dead one,
    which could not be unloaded.
    """
    tail = tail_ms(load)
    if tail is None:
        return None, "the tail latency is not known: no answers, though texts wait, or no heartbeat"
    workers = sorted(have)
    kept = {worker for worker in workers if worker not in alive} | _last_of_the_longest(have)
    outstanding = [sys.maxsize if worker in kept else load.outstanding.get(worker, 0) for worker in workers]
    decision = decide(tail, front.settings.slo_ms, below_since_s, outstanding, front.least, front.most)
    said = f"p98 {tail:.1f} ms, objective {front.settings.slo_ms:g} ms, {len(workers)} workers"
    if decision.action == "out":
        if not spare:
            return None, f"{said}: one more is wanted, but there is no other worker model; run `make engines`"
        return Action("load", spare[0], front.edges[-1] if front.is_binned else ALL), said
    if decision.action == "in" and decision.worker is not None:
        worker = workers[decision.worker]
        if worker in kept:
            return None, f"{said}: one fewer is wanted, but none can be spared"
        return Action("unload", worker, before=have[worker]), f"{said}, below half for {below_since_s:.0f} s"
    return None, said


def _last_of_the_longest(have: Mapping[str, int]) -> set[str]:
    longest = ALL if ALL in have.values() else max(have.values(), default=ALL)
    holders = {worker for worker, bin_ in have.items() if bin_ == longest}
    return holders if len(holders) == 1 else set()
