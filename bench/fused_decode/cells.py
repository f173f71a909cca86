"""The cells of `bench.fused_decode`: systems under loads, measured in turn."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
STATIC, CONTINUOUS, INSTANCES = "static batch", "continuous batching", "concurrent instances"
WINDOWS = {"dynamic, 0.5 s": 0.5, "dynamic, 2 s": 2.0}
ALONE, BUSY = "alone", "beside a busy loop"

_BUSY_LOOP = "while True: pass"
D = TypeVar("D", bound=DecodeSystem)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    requests    requests of each load
    new_tokens  tokens of each answer in loads of equal answers
    rounds      rounds of the loads whose ratios matter most; the others have one
    budget_s    no cell begins later than this after the time of a single request is measured
    flights     further numbers of requests at once, for ours and RUNTIMES
    poisson     the paper's mean gaps in ms, for all systems
    fig5        further mean gaps, for ours
    lengths     whether answers of random lengths are measured
    others      whether requests at a constant interval, and beside a busy loop, are measured
    """

    requests: int
    new_tokens: int
    rounds: int
    budget_s: float
    flights: tuple[int, ...] = ()
    poisson: tuple[int, ...] = ()
    fig5: tuple[int, ...] = ()
    lengths: bool = False
    others: bool = True


class DecodeBench:
    """Runs the cells and keeps every run by load and system.

    poisson: names of the loads with the paper's mean gaps, by gap in ms; skipped: cells for which no time was left.
    """

    def __init__(self, scale: Scale, loads: LoadGenerator, seed: int) -> None:
        self.scale = scale
        self.loads = loads
        self.runs: dict[tuple[str, str], list[Run]] = {}
        self.skipped: list[str] = []
        self.poisson: dict[int, str] = {}
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

    def beside_busy_loop(self, load: Load, systems: Sequence[DecodeSystem]) -> None:
        """As `measure`, while another process keeps one core busy."""
        for system in self._order(systems):
            with _busy_loop():
                self._keep(BUSY, load, system)

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


@contextmanager
def _busy_loop() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", _BUSY_LOOP])
    try:
        yield
    finally:
        process.kill()
        process.wait()
