"""The cascade and its large model behind one Triton server, in turn, closed loop and open loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.loads import Outcome, TritonModel
from bench.systems import triton
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
    build: Path,
    texts: Sequence[str],
    seed: int,
) -> str:
    """A table of both loads: `front` against the model `large`, one text a request, each text asked once.

    engines: how many engines each later level loads. Open loop at half the rate that the large model alone could take.
    """
    lines = [f"\n{task} through the server, {len(texts)} requests, one text each", _HEAD]
    with triton({**engines, front: 0}, repositories, build) as server:
        systems = [
            TritonModel(name, server.grpc_url, model) for name, model in (("always large", large), ("ours", front))
        ]
        for system in systems:
            system.closed(texts, 1, _WARM_UP)
        # In turn, so that what else the machine does falls on both.
        closed = [system.closed(texts, 1, len(texts)) for _ in range(2) for system in systems]
        rate = 0.5e3 / float(np.mean([closed[0].latency_ms.mean(), closed[2].latency_ms.mean()]))
        instants = poisson(rate, len(texts) / rate, np.random.default_rng(seed))
        asked = [texts[number % len(texts)] for number in range(len(instants))]
        opened = [system.open(asked, instants) for system in systems]
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
