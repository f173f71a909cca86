"""The cascade and its large model in one Triton server: closed loop and open loop, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.common.output import Row
from bench.common.server import loaded_server
from bench.common.systems import Outcome, TritonModel
from shapeshift.workloads.arrivals import poisson

_WARM_UP = 50


def measure(
    engines: Mapping[str, int], large: str, front: str, repositories: Sequence[Path], texts: Sequence[str], seed: int
) -> list[Row]:
    """A row for each load and system: `front` against the model `large`, one text a request, each text once.

    engines: the number of engines of each later level. The open loop has half the rate of the large model alone.
    """
    with loaded_server({**engines, front: 0}, repositories) as server:
        systems = [
            TritonModel(name, server.grpc_url, model) for name, model in (("always large", large), ("ours", front))
        ]
        for system in systems:
            system.closed(texts, 1, _WARM_UP)
        # In turn, so that other load on the machine affects both.
        closed = [system.closed(texts, 1, len(texts)) for _ in range(2) for system in systems]
        rate = 0.5e3 / float(np.mean([closed[0].mean_ms, closed[2].mean_ms]))
        instants = poisson(rate, len(texts) / rate, np.random.default_rng(seed))
        sent = [texts[number % len(texts)] for number in range(len(instants))]
        opened = [system.open(sent, instants) for system in systems]
    return [*_rows("closed loop", closed[0::2], closed[1::2]), *_rows(f"open, {rate:.0f}/s", opened[:1], opened[1:])]


def _rows(load: str, large: Sequence[Outcome], ours: Sequence[Outcome]) -> list[Row]:
    rows: list[Row] = []
    base_ms = float(np.concatenate([one.latency_ms for one in large]).mean())
    for name, outcomes in (("always large", large), ("ours", ours)):
        times = np.concatenate([one.latency_ms for one in outcomes])
        p25, p50, p75, p99 = np.percentile(times, [25, 50, 75, 99]).tolist()
        row = {"system": name, "load": load, "mean_ms": float(times.mean()), "p25": p25, "p50": p50, "p75": p75}
        failed = sum(one.failed for one in outcomes)
        rows.append({**row, "p99": p99, "failed": failed, "of the first": float(times.mean()) / base_ms})
    return rows
