"""Benchmarks of systems that encode texts: cells of text length, load and system, measured in rounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from bench.common.foreign_load import ForeignLoad
from bench.common.output import BUILD, progress, table
from bench.common.systems import EncodeWorker, OpenSystem, Outcome, System
from bench.peers.infinity import Engine
from client import perf_analyzer
from shapeshift.errors import ShapeshiftError
from shapeshift.workloads import arrivals, lengths
from shapeshift.workloads.text import TextMaker

CHECKPOINT = BUILD / "checkpoints" / "all-MiniLM-L6-v2"
LAWS = {"short": lengths.short(), "long": lengths.long()}
ST_SLOWNESS = 8
"""ST and the library get this many times fewer requests a cell, so that all cells last about as long."""

S = TypeVar("S", bound=System)


@dataclass(frozen=True)
class TextScale:
    """How much is measured.

    open_s: seconds of each open-loop cell; laws: of LAWS; peers: engines of infinity.
    """

    rounds: int
    requests: int
    open_s: float
    concurrencies: tuple[int, ...]
    laws: tuple[str, ...]
    peers: tuple[Engine, ...]


class TextBench:
    """Runs the cells and keeps of each, by (law, load, system): its outcome, the cores that other processes used, and
    the processor time of this process tree (systems, idle ones too, and clients) in ms a request.
    """

    def __init__(self, scale: TextScale, seed: int) -> None:
        self.scale = scale
        self.outcomes: dict[tuple[str, str, str], list[Outcome]] = {}
        self.foreign: dict[tuple[str, str, str], list[float]] = {}
        self.own_ms: dict[tuple[str, str, str], list[float]] = {}
        self._shuffle = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        self.texts = {law: self._texts(law) for law in scale.laws}

    def closed(self, systems: Sequence[System]) -> None:
        """Run closed loops at each concurrency."""
        for law in self.scale.laws:
            for concurrency in self.scale.concurrencies:
                for _ in range(self.scale.rounds):
                    for system in self._order(systems):
                        count = max(concurrency * 3, self._count(system, law))
                        run = partial(system.closed, self.texts[law], concurrency, count)
                        self._keep(law, f"closed {concurrency}", system.name, run)

    def open(self, systems: Sequence[OpenSystem], capacity_of: str) -> None:
        """Send Poisson arrivals at 50% and 80% of the closed-loop throughput of the system `capacity_of`."""
        for law in self.scale.laws:
            capacity = self.per_second(law, f"closed {self.scale.concurrencies[-1]}", capacity_of)
            for share in (0.5, 0.8) if capacity else ():
                for _ in range(self.scale.rounds):
                    instants = arrivals.poisson(capacity * share, self.scale.open_s, self._rng)
                    for system in self._order(systems):
                        run = partial(system.open, self.texts[law], instants)
                        self._keep(law, f"open {share:.0%} of {capacity_of}", system.name, run)

    def analyzer(self, url: str, fronts: Mapping[str, str], bare: EncodeWorker, concurrencies: Sequence[int]) -> None:
        """Run perf_analyzer on `fronts` (name: model) and the bare engines, on the same texts, in turn."""
        for law in self.scale.laws:
            for concurrency in concurrencies:
                for _ in range(self.scale.rounds):
                    count = self._count(bare, law)
                    load = f"perf_analyzer {concurrency}"
                    for name, model in fronts.items():
                        run = partial(_analyze, url, model, self.texts[law], concurrency, count)
                        self._keep(law, load, name, run)
                    self._keep(law, load, bare.name, partial(bare.closed, self.texts[law], concurrency, count))

    def per_second(self, law: str, load: str, system: str) -> float:
        """Answers a second, the median over the rounds; a ratio over none is infinite and ends no run."""
        return cast("float", np.median([outcome.per_second for outcome in self.outcomes[law, load, system]]))

    def processor_ms(self, law: str, load: str, system: str) -> float:
        """Processor time of a request in ms, the median over the rounds: other load changes it less than the rate."""
        return float(np.median(self.own_ms[law, load, system]))

    def percentile(self, law: str, load: str, system: str, q: float) -> float:
        """A percentile of the latencies in ms, the median over the rounds."""
        return float(np.median([outcome.percentile(q) for outcome in self.outcomes[law, load, system]]))

    def loads(self, law: str, system: str) -> list[str]:
        """The loops, closed and open, that a system had."""
        return [load for (of, load, name) in self.outcomes if (of, name) == (law, system) and "perf" not in load]

    def systems(self, law: str, load: str) -> list[str]:
        """The systems that were measured under a load."""
        return [name for (*cell, name) in self.outcomes if cell == [law, load]]

    def tables(self, law: str, bound_per_s: float = 0.0) -> str:
        """A table for each load. bound_per_s: texts a second that the machine could encode at most, if it is known."""
        shown = []
        for load, rows in itertools.groupby(self.records(), lambda row: row["load"] if row["lengths"] == law else ""):
            cells = [{name: value for name, value in row.items() if name not in ("lengths", "load")} for row in rows]
            for cell in cells if bound_per_s else ():
                cell["of bound"] = round(cell["per_second"] / bound_per_s, 3)
            bound = f" (bound {bound_per_s:.0f}/s)" if bound_per_s else ""
            shown += [table(f"{law} texts, {load}{bound}", cells)] if load else []
        return "\n".join(shown)

    def records(self) -> list[dict[str, Any]]:
        """Every cell as a plain record, with the medians over its rounds."""
        return [
            {
                "system": system,
                "lengths": law,
                "load": load,
                "rounds": len(outcomes),
                "per_second": round(self.per_second(law, load, system), 2),
                "mean_ms": round(float(np.median([outcome.mean_ms for outcome in outcomes])), 3),
                "p50_ms": round(self.percentile(law, load, system, 50), 3),
                "p98_ms": round(self.percentile(law, load, system, 98), 3),
                "failed": sum(outcome.failed for outcome in outcomes),
                "foreign": round(float(np.median(self.foreign[law, load, system])), 2),
                "processor_ms": round(self.processor_ms(law, load, system), 2),
            }
            for (law, load, system), outcomes in self.outcomes.items()
        ]

    def _keep(self, law: str, load: str, system: str, run: Callable[[], Outcome]) -> None:
        with ForeignLoad() as foreign:
            outcome = run()
        self.outcomes.setdefault((law, load, system), []).append(outcome)
        self.foreign.setdefault((law, load, system), []).append(foreign.cores)
        requests = len(outcome.latency_ms) + outcome.failed
        self.own_ms.setdefault((law, load, system), []).append(foreign.own_s * 1e3 / max(1, requests))
        progress(f"{law}, {load}: {system} {outcome.per_second:.0f}/s")

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
    inputs = [{"TEXT": [text]} for text in texts]
    try:
        measured = perf_analyzer.measure(url, model, inputs, concurrency, count, timeout_s=40.0 + 2.0 * count)
    except ShapeshiftError as error:
        progress(f"perf_analyzer, {model}: {error}")
        return Outcome(np.array([]), 0.0, count)
    return Outcome(measured.latency_ms, measured.per_second)
