"""The cells of `bench.fused_decode`: systems under loads, measured in turn."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.common.foreign_load import ForeignLoad
from bench.common.output import progress
from bench.fused_decode.loads import Load, LoadGenerator, Run, median
from bench.fused_decode.systems import DecodeSystem
from shapeshift.engines.hardware import cores

OURS, TRITON, UNARY = "ours", "ours, through Triton", "ours, plain requests"
GENAI, LLAMA_CPP = "OpenVINO GenAI", "llama.cpp"
RUNTIMES = (GENAI, LLAMA_CPP)
"""Programs that are measured under every load that ours is."""
STATIC, CONTINUOUS = "static batch", "continuous batching"
ALONE = "alone"

D = TypeVar("D", bound=DecodeSystem)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    requests    requests of each load
    new_tokens  tokens of each answer in loads of equal answers
    rounds      rounds of each load
    budget_s    no cell begins later than this after the time of a single request is measured
    flights     further numbers of requests at once, for ours and RUNTIMES
    poisson     the paper's mean gaps in ms, for ours, RUNTIMES and CONTINUOUS
    """

    requests: int
    new_tokens: int
    rounds: int
    budget_s: float
    flights: tuple[int, ...] = ()
    poisson: tuple[int, ...] = ()


class DecodeBench:
    """Runs the cells and keeps every run by load and system. skipped: cells for which no time was left."""

    def __init__(self, scale: Scale, loads: LoadGenerator, seed: int) -> None:
        self.scale = scale
        self.loads = loads
        self.runs: dict[tuple[str, str], list[Run]] = {}
        self.skipped: list[str] = []
        self._shuffle = random.Random(seed)
        self._end = float("inf")

    def warm_up(self, systems: Sequence[DecodeSystem]) -> None:
        """Give each system a short, unmeasured load."""
        for system in systems:
            system.replay(self.loads.at_once(2))

    def alone(self, systems: Sequence[DecodeSystem]) -> float:
        """Measure single requests, and start the time budget. Returns the first system's seconds for one request."""
        for _ in range(max(2, self.scale.rounds)):
            self.measure(self.loads.at_once(1), systems, ALONE)
        self._end = time.monotonic() + self.scale.budget_s
        return median([run.span_s for run in self.runs[ALONE, systems[0].name]])

    def measure(self, load: Load, systems: Sequence[DecodeSystem], name: str = "") -> None:
        """Measure `load` on each of the systems, in random order."""
        for system in self._order(systems):
            self._keep(name or load.name, load, system)

    def rate(self, load: str, system: str) -> float:
        """Tokens a second, the median over the rounds."""
        return median([run.tokens_per_second for run in self.runs[load, system]])

    def mean_ms(self, what: str, load: str, system: str) -> float:
        """The mean of `latency_ms`, `first_token_ms` or `between_ms`, the median over the rounds."""
        return median([float(getattr(run, what).mean()) for run in self.runs[load, system]])

    def has(self, load: str, *systems: str) -> bool:
        return all((load, system) in self.runs for system in systems)

    def _keep(self, name: str, load: Load, system: DecodeSystem) -> None:
        if time.monotonic() > self._end:
            self.skipped.append(f"{name}: {system.name}")
            return
        with ForeignLoad() as foreign:
            replayed = system.replay(load)
        run = Run(load, replayed, foreign.cores / cores())
        self.runs.setdefault((name, system.name), []).append(run)
        progress(f"{name}: {system.name} {run.tokens_per_second:.0f} tokens/s")

    def _order(self, systems: Sequence[D]) -> list[D]:
        return self._shuffle.sample(systems, len(systems))
