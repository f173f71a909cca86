"""Twitter-like traces: stable (Poisson) or bursty arrivals; lengths of the long law whose median drifts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.polymorph.fleet import LatencyCurve
from client.open_loop import PlannedRequest
from shapeshift.workloads import lengths
from shapeshift.workloads.arrivals import TWITTER_LIKE, format_states
from shapeshift.workloads.load import Load
from shapeshift.workloads.trace import Trace

_CLS, _SEP, _FIRST_WORD, _LAST_WORD = 101, 102, 1996, 29612


@dataclass(frozen=True)
class Traffic:
    """load: share of the workers' time; drift, drift_s: amplitude (in logarithms) and period of the median's drift."""

    load: float
    bursty: bool = False
    drift: float = 0.3
    drift_s: float = 120.0
    duration_s: float = 60.0

    def __str__(self) -> str:
        kind = "bursty" if self.bursty else "stable"
        return f"{kind}, load {self.load:.0%}, median x e^(±{self.drift:g}) in {self.drift_s:g} s"

    def draw(self, per_s: float, seed: int) -> Trace:
        """Its requests; `per_s` at load 1."""
        return Load(
            "mmpp" if self.bursty else "poisson",
            rate=per_s * self.load,
            duration_s=self.duration_s,
            states=format_states(TWITTER_LIKE),
            lengths="long",
            drift=self.drift,
            drift_s=self.drift_s,
        ).draw(seed)


def capacity_per_s(curve: LatencyCurve, edges: Sequence[int], workers: int) -> float:
    """Texts a second of the long law that keep all workers busy, each text in its own bin."""
    sample = lengths.long().sample(np.random.default_rng(0), 20000).tolist()
    spent = sum(curve.at(edges[bisect_left(edges, length)]) for length in sample) / len(sample)
    return workers / spent * 1e3


def planned(trace: Trace, seed: int) -> list[PlannedRequest]:
    """The requests of a trace; texts are token ids."""
    rng = np.random.default_rng(seed)
    requests = []
    for at, length in zip(trace.at_s.tolist(), trace.length.tolist(), strict=True):
        words = rng.integers(_FIRST_WORD, _LAST_WORD, max(0, length - 2))
        ids = np.array([[_CLS, *words.tolist(), _SEP][:length]], dtype=np.int64)
        requests.append(PlannedRequest(at, {"INPUT_IDS": ids, "ATTENTION_MASK": np.ones_like(ids)}))
    return requests
