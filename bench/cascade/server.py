"""The cascade and its large model in one Triton server: closed loop and open loop, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.common.server import loaded_server
from bench.common.systems import Outcome, TritonModel
from shapeshift.workloads.arrivals import poisson

_WARM_UP = 50
_LINE = 36
_HEAD = f"{'':{_LINE}}{'mean ms':>9}{'p25':>8}{'p50':>8}{'p75':>8}{'p99':>8}{'failed':>7}"


def measure(
    task: str,
    engines: Mapping[str, int],
    large: str,
    front: str,
    repositories: Sequence[Path],
    texts: Sequence[str],
    seed: int,
) -> str:
    """A table of both loads: `front` against the model `large`, one text a request, each text once.

    engines: the number of engines of each later level. The open loop has half the rate of the large model alone.
    """
    lines = [f"\n{task} through the server, {len(texts)} requests, one text each", _HEAD]
    with loaded_server({**engines, front: 0}, repositories) as server:
        systems = [
            TritonModel(name, server.grpc_url, model) for name, model in (("always large", large), ("ours", front))
        ]
        for system in systems:
            system.closed(texts, 1, _WARM_UP)
        # In turn, so that other load on the machine affects both.
        closed = [system.closed(texts, 1, len(texts)) for _ in range(2) for system in systems]
        rate = 0.5e3 / float(np.mean([closed[0].latency_ms.mean(), closed[2].latency_ms.mean()]))
        instants = poisson(rate, len(texts) / rate, np.random.default_rng(seed))
        sent = [texts[number % len(texts)] for number in range(len(instants))]
        opened = [system.open(sent, instants) for system in systems]
    lines += _rows("closed loop", [closed[0], closed[2]], [closed[1], closed[3]])
    lines += _rows(f"open, {rate:.0f}/s", opened[:1], opened[1:])
    return "\n".join(lines) + "\n"


def _rows(load: str, large: Sequence[Outcome], ours: Sequence[Outcome]) -> list[str]:
    lines, means = [], []
    for name, own in (("always large", large), ("ours", ours)):
        times = np.concatenate([one.latency_ms for one in own])
        means.append(float(times.mean()))
        values = "".join(f"{value:8.2f}" for value in np.percentile(times, [25, 50, 75, 99]))
        failed = sum(one.failed for one in own)
        lines.append(f"  {f'{load}: {name}':{_LINE - 2}}{means[-1]:9.2f}{values}{failed:7}")
    return [*lines, f"{'':{_LINE}}{100 * (means[1] / means[0] - 1):+8.1f}%"]
