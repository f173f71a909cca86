"""Schemes on the real server, router and scheduler over emulated workers, which wait for measured latencies."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np

from bench.common.foreign_load import ForeignLoad
from bench.common.output import FOLDER
from bench.polymorph.fleet import emulated_front, read_curve, running_fleet
from bench.polymorph.schemes import SchemeSettings, model
from bench.polymorph.traces import Traffic, capacity_per_s, draw, planned
from client.open_loop import replay
from shapeshift.simulate.polymorph import run
from shapeshift.triton.metrics import scrape

SLO_MS = 450.0
WORK_FOLDER = FOLDER / "polymorph"
_CHANGE_S = 2.0
_TIMEOUT_S = 120.0


def edges(step: int = 64) -> tuple[int, ...]:
    """The paper's bins: every 64 tokens."""
    return tuple(range(step, 513, step))


class Cell:
    """Schemes under one load, served by emulated workers and simulated on the same requests.

    slower: factor on every latency, so that two cores can carry the load of many workers; results are divided by it.
    """

    def __init__(self, workers: int, traffic: Traffic, period_s: float, seed: int, slower: float = 1.0) -> None:
        self.workers, self.traffic, self.period_s, self.seed, self.slower = workers, traffic, period_s, seed, slower
        self._curve = read_curve()
        per_s = capacity_per_s(self._curve, edges(), workers) / slower
        self._at_s, self._tokens = draw(traffic, per_s, seed)

    def alone(self) -> str:
        """The bound: mean and p98 of these requests, each alone in the shortest bin that holds it."""
        bins = np.asarray(edges())
        padded = bins[np.searchsorted(bins, self._tokens)]
        ms = np.interp(padded, self._curve.lengths, self._curve.latency_ms)
        return f"each text alone: mean {ms.mean():.1f}, p98 {np.percentile(ms, 98):.1f} ms"

    def served(self, name: str, scheme: SchemeSettings) -> dict[str, object]:
        """Serve the requests through Triton; a row of the table."""
        folder = WORK_FOLDER / "emulated"
        shutil.rmtree(folder, ignore_errors=True)
        parameters = {
            "bins": ",".join(map(str, edges())),
            "slo_ms": f"{SLO_MS * self.slower:g}",
            "workers": self.workers,
            "min_workers": self.workers,
            "queue_rows": 100000,
            # Every request is served, however long it waits: the schemes are compared by their waits.
            "max_queue_ms": 0,
            **scheme.parameters(),
        }
        repository = emulated_front(folder, "emulated", self._tokens.tolist(), self.slower, **parameters)
        with running_fleet(folder, (repository,), {"emulated": self.workers}, self.period_s) as server:
            requests = planned(self._at_s, self._tokens, self.seed)
            with ForeignLoad() as foreign:
                report = asyncio.run(
                    replay(server.grpc_url, "emulated", requests, timeout_s=_TIMEOUT_S, max_in_flight=100000)
                )
            retries = sum(v for (n, _), v in scrape(server.metrics_url, 5.0).items() if n == "shapeshift_retries_total")
        latency = report.latency_s[report.ok] * 1e3 / self.slower
        return {
            "scheme": name,
            "what": "emulated",
            "mean_ms": float(latency.mean()),
            "p98_ms": float(np.percentile(latency, 98)),
            "requests": len(requests),
            "failed": int((~report.ok).sum()),
            "retries": int(retries),
            "foreign": foreign.cores,
        }

    def simulated(self, name: str, scheme: SchemeSettings) -> dict[str, object]:
        """Simulate the requests as discrete events, without server and processes; a row of the table."""
        period_s, change_s = self.period_s / self.slower, _CHANGE_S / self.slower
        result = run(
            model(self._curve, edges(), SLO_MS),
            self.workers,
            self._at_s / self.slower,
            self._tokens,
            scheme.simulated(period_s, change_s),
        )
        return {
            "scheme": name,
            "what": "simulated",
            "mean_ms": float(result.latency_ms.mean()),
            "p98_ms": float(np.percentile(result.latency_ms, 98)),
            "requests": len(result.latency_ms),
            "failed": 0,
            "retries": 0,
            "foreign": 0.0,
        }
