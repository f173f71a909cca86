"""Schemes on the real server, router and scheduler over emulated workers, which wait for measured latencies."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np

from bench.common.foreign_load import ForeignLoad
from bench.common.output import FOLDER, Row
from bench.polymorph.fleet import emulated_front, read_curve, running_fleet
from bench.polymorph.schemes import EDGES, SLO_MS, Scheme, System, row
from bench.polymorph.traces import Traffic, capacity_per_s, planned
from client.open_loop import replay
from shapeshift.simulate.planner import Pace

WORK_FOLDER = FOLDER / "polymorph"
_CHANGE_S = 2.0
_TIMEOUT_S = 120.0


class Cell:
    """Schemes under one load, served by emulated workers and simulated on the same requests.

    slower: factor on every latency, so that two cores can carry the load of many workers; results are divided by it.
    """

    def __init__(self, workers: int, traffic: Traffic, period_s: float, seed: int, slower: float = 1.0) -> None:
        self.workers, self.period_s, self.seed, self.slower = workers, period_s, seed, slower
        self._curve = read_curve()
        per_s = capacity_per_s(self._curve, EDGES, workers) / slower
        self._trace = traffic.draw(per_s, seed)

    def alone(self) -> str:
        """The bound: mean and p98 of these requests, each alone in the shortest bin that holds it."""
        bins = np.asarray(EDGES)
        ms = np.interp(bins[np.searchsorted(bins, self._trace.length)], self._curve.lengths, self._curve.latency_ms)
        return f"each text alone: mean {ms.mean():.1f}, p98 {np.percentile(ms, 98):.1f} ms"

    def served(self, name: str, scheme: Scheme) -> Row:
        """Serve the requests through Triton; a row of the table."""
        folder = WORK_FOLDER / "emulated"
        shutil.rmtree(folder, ignore_errors=True)
        parameters = {
            "bins": ",".join(map(str, EDGES)),
            "slo_ms": f"{SLO_MS * self.slower:g}",
            "workers": self.workers,
            "min_workers": self.workers,
            "queue_rows": 100000,
            # Every request is served, however long it waits: the schemes are compared by their waits.
            "max_queue_ms": 0,
            **scheme,
        }
        repository = emulated_front(folder, "emulated", self._trace.length.tolist(), self.slower, **parameters)
        with running_fleet(folder, (repository,), {"emulated": self.workers}, self.period_s) as server:
            requests = planned(self._trace, self.seed)
            with ForeignLoad() as foreign:
                report = asyncio.run(
                    replay(server.grpc_url, "emulated", requests, timeout_s=_TIMEOUT_S, max_in_flight=100000)
                )
        latency = report.latency_s[report.ok] * 1e3 / self.slower
        return {
            "scheme": name,
            "what": "emulated",
            "mean_ms": float(latency.mean()),
            "p98_ms": float(np.percentile(latency, 98)),
            "requests": len(requests),
            "failed": int((~report.ok).sum()),
            "foreign": foreign.cores,
        }

    def simulated(self, name: str, scheme: Scheme) -> Row:
        """Simulate the requests as discrete events, without server and processes; a row of the table."""
        pace = Pace(self.period_s / self.slower, change_s=_CHANGE_S / self.slower)
        result = System(scheme, pace=pace).over(self._curve, self.workers, self._trace.scaled(self.slower))
        return {**row(name, result), "what": "simulated"}
