"""The cells of `bench.fused_decode`: which system was measured under which load, in turn."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from bench.decode_loads import Load, LoadMaker, Run, median
from bench.decode_systems import DecodeSystem
from bench.foreign import ForeignLoad
from shapeshift.engines.hardware import cores

OURS, TRITON, GENAI = "ours", "ours, through Triton", "OpenVINO GenAI"
STATIC, CONTINUOUS, INSTANCES = "static batch", "continuous batching", "concurrent instances"
WINDOWS = {"dynamic, 0.5 s": 0.5, "dynamic, 2 s": 2.0}
ALONE, BUSY = "alone", "beside a busy loop"

_BUSY_LOOP = "while True: pass"
D = TypeVar("D", bound=DecodeSystem)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    requests   of each load; new: tokens of each answer where they are equally long
    rounds     of the loads whose ratios matter most; the others have one
    flights    requests at once, beside `requests`, that ours and GenAI are also given
    poisson    the paper's mean gaps in ms under which all systems are measured
    fig5       further ones for ours
    budget_s   after this, once one request's time is known, no further cell begins
    """

    requests: int
    new: int
    rounds: int
    flights: tuple[int, ...]
    poisson: tuple[int, ...]
    fig5: tuple[int, ...]
    lengths: bool
    budget_s: float


class Bench:
    """Runs the cells and keeps every run by load and system.

    poisson, constant: names of the loads with the paper's mean gaps, by gap in ms, and with its constant interval
    """

    def __init__(self, scale: Scale, maker: LoadMaker, seed: int) -> None:
        self.scale = scale
        self.maker = maker
        self.runs: dict[tuple[str, str], list[Run]] = {}
        self.skipped: list[str] = []
        self.poisson: dict[int, str] = {}
        self.constant = ""
        self._shuffle = random.Random(seed)
        self._end = float("inf")

    def warm_up(self, systems: Sequence[DecodeSystem]) -> None:
        """A short load each, which is not kept."""
        for system in systems:
            system.replay(self.maker.at_once(2))

    def alone(self, systems: Sequence[DecodeSystem]) -> float:
        """One request at a time; the seconds that the first system takes for one. From now on the time counts."""
        for _ in range(max(2, self.scale.rounds)):
            self.measure(self.maker.at_once(1), systems, ALONE)
        self._end = time.monotonic() + self.scale.budget_s
        return median([run.span_s for run in self.runs[ALONE, systems[0].name]])

    def measure(self, load: Load, systems: Sequence[DecodeSystem], name: str = "") -> None:
        """`load` for each of the systems, in random order."""
        for system in self._order(systems):
            self._keep(name or load.name, load, system)

    def beside_busy_loop(self, load: Load, systems: Sequence[DecodeSystem]) -> None:
        """As `measure`, while another process uses as much of one core as it can get."""
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
        sys.stderr.write(f"\r\033[K{name}: {system.name} {run.tokens_per_second:.0f} tokens/s")

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
