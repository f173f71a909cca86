"""A simulated front of texts as the live page sees a server: stands in for `live.source.Source`."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from shapeshift.live.counters import Page
from shapeshift.live.source import HISTORY_S, PERIOD_S, SERVES, Addresses, Pages, View
from shapeshift.loops import Loop
from shapeshift.serving.events import Event
from shapeshift.serving.metrics import PREFIX, RequestMetrics
from shapeshift.sidecar.policy import plan
from shapeshift.simulate.planner import Planner
from shapeshift.simulate.polymorph import OUTCOMES, SERVED, UNSERVED, Call
from shapeshift.simulate.systems import TextSystem
from shapeshift.triton.metrics import Labels
from shapeshift.workloads.trace import Trace

_PROCESS = "simulated"
_MOST_DECISIONS = 20


class _StoppedError(Exception):
    """The page is closed. A simulation has no other end before its last text."""


class SimulatedSource:
    """Serves a trace on a thread, again and again, at `speed` times the pace of the clock.

    addresses: of no server; view, problem: as those of `Source`.
    """

    def __init__(self, name: str, system: TextSystem, trace: Trace, speed: float = 1.0) -> None:
        self.addresses = Addresses("", "", f"simulation of {name}", "", Path())
        self.view: View | None = None
        self.problem = "not begun yet"
        self._system, self._trace, self._speed = system, trace, speed
        self._loop = Loop("simulation", self._serve, self._report)

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self) -> None:
        """End it."""
        self._loop.stop(3.0)

    def _serve(self) -> float:
        watched = WatchedRun(self._system.planner(self._trace), self._trace)
        watched.planner.events.every(PERIOD_S * self._speed, partial(self._show, watched))
        with contextlib.suppress(_StoppedError):
            watched.planner.run()
            # Also a load that ends before the first look is seen, and the thread can end.
            self._show(watched)
        return 0.0

    def _report(self, problem: str) -> None:
        self.problem = problem

    def _show(self, watched: WatchedRun) -> None:
        self.view, self.problem = watched.view(), ""
        if self._loop.stopped.wait(PERIOD_S):
            raise _StoppedError


class WatchedRun:
    """One run of a simulated front, and what the metrics, rings and sidecar of a server would say meanwhile."""

    def __init__(self, planner: Planner, trace: Trace) -> None:
        self.planner, self._trace = planner, trace
        self._calls: list[Call] = []
        planner.served.listeners.append(self._calls.append)
        self._front = planner.front
        self._metrics = RequestMetrics("texts", int(trace.length.max()), self._front.settings.slo_ms)
        self._pages = Pages()
        self._packs: dict[str, deque[Event]] = defaultdict(deque)
        self._engines: Counter[int] = Counter()
        self._arrived = 0

    def view(self) -> View:
        """What is known at the simulated time."""
        now = self.planner.events.now
        self._read(now)
        self._pages.add(Page(dict(self._samples()), now))
        events = {name: list(packs) for name, packs in self._packs.items()}
        decisions = [
            {"at": _clock(at), "kind": "plan", "subject": self._front.name, "text": why}
            for at, _, why in self.planner.plans[-_MOST_DECISIONS:]
        ]
        return View(now, self._pages.change(), self._pages.minute(), events, self._status(), (), decisions)

    def _read(self, now: float) -> None:
        """Count what came and what ended since the last look."""
        while self._arrived < len(self._trace) and self._trace.at_s[self._arrived] <= now:
            self._metrics.lengths.observe(int(self._trace.length[self._arrived]))
            self._arrived += 1
        for at, worker, rows, ms in self._calls:
            lengths = [row.tokens for row in rows]
            size = max(worker.bin, sum(lengths))
            values = {"thread": "engine-0", "size": size, "tokens": sum(lengths), "texts": lengths, "ms": round(ms, 2)}
            name = worker.name if self._front.has_workers else self._front.name
            self._packs[name].append(Event("pack", at, values))
            self._engines[worker.bin] += 1
            for row in rows:
                self._metrics.latency_ms.observe(1e3 * (at - row.arrived) + self.planner.pace.overhead_ms)
        self._calls.clear()
        for packs in self._packs.values():
            while packs and packs[0].at < now - HISTORY_S:
                packs.popleft()

    def _samples(self) -> Iterator[tuple[tuple[str, Labels], float]]:
        """The metrics page of the front."""

        def one(name: str, value: float, **labels: str) -> tuple[tuple[str, Labels], float]:
            pairs = {"model": self._front.name, "pid": _PROCESS, **labels}
            return (PREFIX + name.removeprefix(PREFIX), frozenset(pairs.items())), float(value)

        for histogram in (self._metrics.lengths, self._metrics.latency_ms):
            counts, total = histogram.totals()
            for bound, count in zip([*histogram.bounds, "+Inf"], counts, strict=True):
                yield one(f"{histogram.name}_bucket", count, le=str(bound))
            yield one(f"{histogram.name}_sum", total)
            yield one(f"{histogram.name}_count", counts[-1])
        outcomes = self.planner.served.outcomes()[: self._arrived]
        for place, outcome in enumerate(OUTCOMES):
            if place != UNSERVED:
                code = "SUCCESS" if place == SERVED else "UNAVAILABLE"
                yield one("requests_total", (outcomes == place).sum(), code=code, outcome=outcome)
        yield one("requests_waiting", self.planner.served.waiting)
        yield one(
            "worker_rows_total" if self._front.has_workers else "engine_rows_total",
            self._metrics.latency_ms.totals()[0][-1],
        )
        for size, calls in self._engines.items():
            yield one("engine_used_total", calls, engine=str(size or "dynamic"))

    def _status(self) -> dict[str, Any]:
        """As `shapeshift status` says it."""
        planner, front = self.planner, self._front
        outstanding = planner.served.outstanding()
        last = planner.plans[-1] if planner.plans else None
        words = None if last is None else {"plan": plan.format_counts(front, last[1]), "reason": last[2]}
        process = {"name": front.name, "state": SERVES, "pid": None}
        workers = [
            {
                "name": name,
                "front": front.name,
                "bin": bin_edge,
                "state": SERVES if name in planner.served.workers else "loading",
                "outstanding": outstanding.get(name, 0),
                "generation": planner.moved[name],
            }
            for name, bin_edge in sorted(planner.bins.items())
        ]
        return {
            "sidecar": {"pid": _PROCESS, "frozen": not planner.pace.plan_period_s},
            "fronts": [{"name": front.name, "plan": words, "models": [process]}],
            "workers": workers if front.has_workers else [],
            "models": [],
        }


def _clock(seconds: float) -> str:
    """Simulated seconds, as the time of a day that began with the load."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
