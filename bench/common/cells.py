"""Systems under loads, measured in turn: every run by load and system, their figures, tables and ratios."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np

from bench.common.foreign_load import ForeignLoad
from bench.common.output import Row, progress, table

R = TypeVar("R")


@dataclass(frozen=True)
class Run(Generic[R]):
    """One run of one system. foreign: cores that other processes used; own_s: processor time of this process tree."""

    result: R
    foreign: float
    own_s: float


class Cells(Generic[R]):
    """What each system gave under each load. figures: the numbers of a run, the first one to be shown as it is there.

    budget_s: no run begins later than this after the first; skipped: those for which no time was left.
    """

    def __init__(
        self, figures: Callable[[Run[R]], Mapping[str, float]], seed: int = 0, budget_s: float = math.inf
    ) -> None:
        self.runs: dict[tuple[str, str], list[Run[R]]] = {}
        self.skipped: list[str] = []
        self._figures, self._shuffle = figures, random.Random(seed)
        self._budget_s, self._end = budget_s, 0.0

    def measure(self, load: str, systems: Mapping[str, Callable[[], R]], rounds: int = 1) -> None:
        """Run each of the systems once a round, in random order."""
        self._end = self._end or time.monotonic() + self._budget_s
        for _ in range(rounds):
            for system in self._shuffle.sample(list(systems), len(systems)):
                if time.monotonic() > self._end:
                    self.skipped.append(f"{load}: {system}")
                    continue
                with ForeignLoad() as foreign:
                    result = systems[system]()
                self.keep(load, system, Run(result, foreign.cores, foreign.own_s))

    def keep(self, load: str, system: str, run: Run[R]) -> None:
        """Count a run."""
        self.runs.setdefault((load, system), []).append(run)
        name, value = next(iter(self._figures(run).items()))
        progress(f"{load}, {system}: {name} {value:.4g}")

    @property
    def loads(self) -> list[str]:
        """The loads, in the order in which they were first measured."""
        return list(dict.fromkeys(load for load, _ in self.runs))

    def systems(self, load: str) -> list[str]:
        """The systems that were measured under a load."""
        return [system for of, system in self.runs if of == load]

    def figure(self, load: str, system: str, name: str) -> float:
        """A figure of a cell, the median over its rounds."""
        return self._medians(load, system)[name]

    def over(self, load: str, ours: str, other: str, name: str) -> float:
        """A figure of ours over another system's; infinite, not an error, over 0."""
        return cast("float", np.divide(self.figure(load, ours, name), self.figure(load, other, name)))

    def ratios(self, ours: Sequence[str], names: Sequence[str]) -> list[Row]:
        """These figures of each of `ours` over those of every other system but those of ours that follow it."""
        return [
            {"load": load, "of": one, "over": other, **{name: self.over(load, one, other, name) for name in names}}
            for load in self.loads
            for place, one in enumerate(ours)
            if one in self.systems(load)
            for other in self.systems(load)
            if other not in ours[place:]
        ]

    def records(self) -> list[Row]:
        """Every cell as a plain record, with the medians over its rounds."""
        return [
            {"system": system, "load": load, "rounds": len(runs), **self._medians(load, system)}
            for (load, system), runs in self.runs.items()
        ]

    def tables(self, title: str = "") -> str:
        """A table for each load; then what was not measured."""
        shown = []
        for load in self.loads:
            rows = [{key: row[key] for key in row if key != "load"} for row in self.records() if row["load"] == load]
            shown.append(table(f"{title}{load}", rows))
        if self.skipped:
            shown.append("\nnot measured, out of time: " + "; ".join(self.skipped))
        return "\n".join(shown)

    def _medians(self, load: str, system: str) -> dict[str, float]:
        runs = self.runs[load, system]
        rows = [{**self._figures(run), "foreign": round(run.foreign, 3)} for run in runs]
        return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
