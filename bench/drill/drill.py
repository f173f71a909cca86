"""The drill: load, a fault, load until all is whole, quiet; and the next fault."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.common.output import Row
from bench.drill.faults import clients, control, files, resources, signals
from bench.drill.faults.scene import Fault, Scene
from bench.drill.outcomes import (
    CODED,
    CUT,
    INTERNAL,
    LOST,
    RIGHT,
    WRONG,
    Cost,
    Outcome,
    cost,
    p99_by_front,
    time_until_whole,
)
from bench.drill.site import Footprint
from shapeshift.errors import ShapeshiftError

CALM_S = 5.0
_PATIENCE_S = 30.0
_SETTLE_S = 10.0
_POLL_S = 0.25
# Answers that are on their way are not late yet.
_UNDER_WAY_S = 1.0
_QUIET_S = 1.5

_SOURCES = (signals, clients, control, files, resources)
_HELD = ("procs", "RSS MB", "fds", "threads", "regions")
_KINDS = {"right": RIGHT, "coded": CODED, "cut": CUT, "internal": INTERNAL, "lost": LOST, "wrong": WRONG}


def every_fault(quick: bool) -> list[Fault]:
    """All faults, or those of a quick run."""
    return [fault for source in _SOURCES for fault in source.faults() if fault.quick or not quick]


def rounds(faults: list[Fault], rng: np.random.Generator) -> Iterator[list[Fault]]:
    """The faults again and again, each time in another order."""
    while True:
        yield [faults[index] for index in rng.permutation(len(faults))]


@dataclass(frozen=True)
class Result:
    """One fault in the table. left: what the processes hold beyond that before it; skipped: why there was no fault."""

    name: str
    within_s: float
    cost: Cost | None = None
    before: Footprint = Footprint()
    after: Footprint = Footprint()
    missed: tuple[str, ...] = ()
    skipped: str = ""


def row(result: Result) -> Row:
    """The row of one fault; what stays behind is the difference of quiet states after and before it."""
    if result.cost is None:
        return {"fault": result.name, "": f"left out: {result.skipped}"}
    before, after = result.before, result.after
    whole_s = "never" if math.isinf(result.cost.whole_s) else f"{result.cost.whole_s:.1f}"
    return {
        "fault": result.name,
        "open": result.cost.in_flight,
        **{name: result.cost.counts[kind] for name, kind in _KINDS.items()},
        "held": result.cost.excused,
        "whole s": whole_s,
        "bound": round(result.within_s),
        **{name: round(b - a) for name, a, b in zip(_HELD, before, after, strict=True)},
        "": "MISSED" if result.missed else "",
    }


def record(result: Result) -> dict[str, Any]:
    """The result as JSON values; an infinite time becomes null."""
    cost = None if result.cost is None else dataclasses.asdict(result.cost)
    if cost is not None and math.isinf(cost["whole_s"]):
        cost["whole_s"] = None
    held = {name: getattr(result, name)._asdict() for name in ("before", "after")}
    return {**vars(result), **held, "cost": cost}


@dataclass
class Drill:
    """Faults on one scene. rates: requests a second of each front; start_s: seconds in which the server starts."""

    scene: Scene
    rates: Mapping[str, float]
    start_s: float
    calm: list[Outcome] = field(default_factory=list)
    usual: Footprint = Footprint()

    def run(self, faults: Iterator[Fault]) -> Iterator[Result]:
        """The result of each fault, when the server is quiet again."""
        before = self.usual = self._quiet(len(self.scene.site.processes()))
        for fault in faults:
            result = self._one(fault, before)
            before = result.after if result.cost else before
            yield result

    def _one(self, fault: Fault, before: Footprint) -> Result:
        traffic = self.scene.traffic
        first = len(traffic.outcomes)
        traffic.resume(self.rates)
        time.sleep(CALM_S)
        self.calm += [one for one in traffic.outcomes[first:] if not one.extra]
        usual = p99_by_front(self.calm)
        server = self.scene.site.processes().get("server")
        within_s = fault.within_s + (self.start_s if fault.restarts else 0.0)
        began_s = time.monotonic()
        self.scene.say(f"{fault.name}")
        reason = ""
        try:
            answer = fault.inject(self.scene)
        except (ShapeshiftError, OSError, TimeoutError) as error:
            answer, reason = False, f"{type(error).__name__}: {error}"
        if isinstance(answer, str):
            traffic.pause()
            self.scene.say(f"  left out: {answer}")
            return Result(fault.name, within_s, skipped=answer)
        from_s = began_s if answer else time.monotonic()
        self._wait_whole(first, from_s, within_s, usual)
        ended_s = time.monotonic()
        traffic.pause()
        outcomes = traffic.outcomes[first:]
        price = cost(outcomes, began_s, fault.holders, fault.held_s, time_until_whole(outcomes, from_s, ended_s, usual))
        after = self._quiet(self.usual.processes)
        missed = list(price.missed(within_s))
        # The other columns tell what Triton keeps of a process that died; docs/drill.md says what that is.
        if (more := after.processes - self.usual.processes) > 0:
            missed.append(f"{more} processes left behind")
        if not fault.restarts and server != self.scene.site.processes().get("server"):
            missed.append("the server ended by itself and was started again")
        if reason:
            missed.append(f"could not be brought about: {reason}")
        for text, number in price.errors.items():
            self.scene.say(f"  {number} x {text[:200]}")
        for line in missed:
            self.scene.say(f"  MISSED {line}")
        return Result(fault.name, within_s, price, before, after, tuple(missed))

    def _wait_whole(self, first: int, from_s: float, within_s: float, usual: Mapping[str, float]) -> None:
        traffic = self.scene.traffic
        limit_s = from_s + within_s + _PATIENCE_S
        while time.monotonic() < limit_s:
            time.sleep(_POLL_S)
            seen = [*traffic.outcomes[first:], *traffic.pending()]
            if time_until_whole(seen, from_s, time.monotonic() - _UNDER_WAY_S, usual) < float("inf"):
                return

    def _quiet(self, expected: int) -> Footprint:
        """What the processes hold without load; processes that end get some time, and a server that starts more."""
        time.sleep(_QUIET_S)
        began = time.monotonic()
        while surplus := len(self.scene.site.processes()) - expected:
            if time.monotonic() - began > (_SETTLE_S if surplus > 0 else self.start_s + _PATIENCE_S):
                break
            time.sleep(_POLL_S)
        return self.scene.site.footprint()
