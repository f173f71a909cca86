"""The cells of `bench.encode`: what was measured under which load, on which system."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.foreign import ForeignLoad
from bench.loads import OpenSystem, Outcome, System
from bench.peers.infinity import Engine
from bench.systems import Worker
from client import perf_analyzer
from shapeshift.workloads import arrivals, lengths
from shapeshift.workloads.text import TextMaker

CHECKPOINT = Path("build/checkpoints/all-MiniLM-L6-v2")
LAWS = {"short": lengths.short(), "long": lengths.long()}
ST_SLOWNESS = 8
"""ST and the library get fewer requests a cell by this factor: a cell should last as long as the others'."""


S = TypeVar("S", bound=System)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int
    requests: int
    open_s: float
    concurrencies: tuple[int, ...]
    laws: tuple[str, ...]
    peers: tuple[Engine, ...]


class Bench:
    """Runs the cells and keeps every outcome under (law, load, system)."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self.scale = scale
        self.outcomes: dict[tuple[str, str, str], list[Outcome]] = {}
        self.foreign: dict[tuple[str, str, str], list[float]] = {}
        self._shuffle = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        self.texts = {law: self._texts(law) for law in scale.laws}

    def closed(self, systems: Sequence[System]) -> None:
        """Closed loops at each concurrency."""
        for law in self.scale.laws:
            for concurrency in self.scale.concurrencies:
                for _ in range(self.scale.rounds):
                    for system in self._order(systems):
                        count = max(concurrency * 3, self._count(system, law))
                        ask = partial(system.closed, self.texts[law], concurrency, count)
                        self._keep(law, f"closed {concurrency}", system.name, ask)

    def open(self, systems: Sequence[OpenSystem], capacity_of: str) -> None:
        """Poisson arrivals at 50% and 80% of the closed-loop throughput of the system `capacity_of`."""
        for law in self.scale.laws:
            capacity = self.per_second(law, f"closed {self.scale.concurrencies[-1]}", capacity_of)
            for share in (0.5, 0.8):
                for _ in range(self.scale.rounds):
                    instants = arrivals.poisson(capacity * share, self.scale.open_s, self._rng)
                    for system in self._order(systems):
                        ask = partial(system.open, self.texts[law], instants)
                        self._keep(law, f"open {share:.0%} of {capacity_of}", system.name, ask)

    def analyzer(self, url: str, fronts: Mapping[str, str], bare: Worker, concurrencies: Sequence[int]) -> None:
        """perf_analyzer on `fronts` (name: model) beside the bare engines, on the same texts, in turn."""
        for law in self.scale.laws:
            for concurrency in concurrencies:
                for _ in range(self.scale.rounds):
                    count = self._count(bare, law)
                    load = f"perf_analyzer {concurrency}"
                    for name, model in fronts.items():
                        ask = partial(_analyze, url, model, self.texts[law], concurrency, count)
                        self._keep(law, load, name, ask)
                    self._keep(law, load, bare.name, partial(bare.closed, self.texts[law], concurrency, count))

    def per_second(self, law: str, load: str, system: str) -> float:
        """Median over the rounds."""
        return float(np.median([outcome.per_second for outcome in self.outcomes[law, load, system]]))

    def percentile(self, law: str, load: str, system: str, q: float) -> float:
        """Median over the rounds of a percentile of the latencies, ms."""
        return float(np.median([np.percentile(o.latency_ms, q) for o in self.outcomes[law, load, system]]))

    def _keep(self, law: str, load: str, system: str, ask: Callable[[], Outcome]) -> None:
        with ForeignLoad() as foreign:
            outcome = ask()
        self.outcomes.setdefault((law, load, system), []).append(outcome)
        self.foreign.setdefault((law, load, system), []).append(foreign.cores)
        sys.stderr.write(f"\r\033[K{law}, {load}: {system} {outcome.per_second:.0f}/s")

    def _order(self, systems: Sequence[S]) -> list[S]:
        return self._shuffle.sample(systems, len(systems))

    def _count(self, system: System, law: str) -> int:
        slow = ST_SLOWNESS if system.name in ("ST", "sentence-transformers") else 1
        return max(24, self.scale.requests // slow // (2 if law == "long" else 1))

    def _texts(self, law: str) -> list[str]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        maker = TextMaker(self._rng, lambda text: len(tokenizer.encode(text).ids))
        return [maker.text(max(3, int(length))) for length in LAWS[law].sample(self._rng, 400)]


def _analyze(url: str, model: str, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
    got = perf_analyzer.measure(url, model, texts, concurrency, count, patience_s=40.0 + 0.5 * count)
    return Outcome(got.latency_ms, got.per_second)
