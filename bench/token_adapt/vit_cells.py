"""The cells of `bench.token_adapt.vit_profile`: measured in turn, with samples kept in a file."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shapeshift.build_engines.image.engines import ImageEngineBuilder, folder_of
from shapeshift.build_engines.image.plan import ImagePlan
from shapeshift.engines.interfaces import Engine
from shapeshift.token_adapt.checkpoints.weights import read_model
from shapeshift.token_adapt.model.gamma_module import GammaModule

Call = Callable[[], object]
Progress = Callable[[str], None]
Ready = Mapping[int, tuple[GammaModule, Engine]]

_LONG_S = 1.0
"""Calls of at least this long need no warm-up: the extra cost of a first call is negligible."""


class Cell(NamedTuple):
    """One engine, or the eager model, at one batch size."""

    gamma: int
    images: int
    eager: bool


def opened(planned: ImagePlan, progress: Progress) -> Ready:
    """Module and engine by gamma. Engines of an earlier run with the same key are reused, others built."""
    work = planned.front.folder / "engines"
    # The same engines serve any number of threads.
    built, key = work / "key", replace(planned, threads=0).key()
    gammas = planned.gammas
    if not built.is_file() or built.read_text() != key:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        engines = ImageEngineBuilder(planned, work, progress)
        for gamma in gammas:
            engines.build_gamma(gamma)
        built.write_text(key)
    progress("open the engines")
    model, _, _ = read_model(planned.checkpoint.folder)
    found = {}
    for gamma in gammas:
        runtime = planned.provider.open(work / folder_of(gamma), planned.precision, planned.threads)
        found[gamma] = GammaModule(model, gamma).eval(), runtime.engine(None, None)
    return found


def calls(ready: Ready, cells: Iterable[Cell]) -> dict[Cell, Call]:
    """The call that each cell measures."""
    found: dict[Cell, Call] = {}
    for cell in cells:
        module, engine = ready[cell.gamma]
        found[cell] = partial(module.features if cell.eager else engine.run, module.example(cell.images))
    return found


class Samples:
    """Wall-clock and processor milliseconds of every call, kept in `file` for engines of this key."""

    def __init__(self, file: Path, key: str, afresh: bool) -> None:
        self.times: dict[Cell, list[tuple[float, float]]] = {}
        self.left = 0
        self._file, self._key = file, key
        if file.is_file() and not afresh:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored["key"] == key:
                self.times = {Cell(*cell): [(wall, own) for wall, own in pairs] for cell, pairs in stored["times"]}

    def measure(
        self, calls: Mapping[Cell, Call], rounds: int, most_ms: float, seconds: float, progress: Progress
    ) -> bool:
        """Run every call until it has `rounds` samples or took `most_ms` in all; false if `seconds` run out first."""
        end, shuffler, warm = time.monotonic() + seconds, random.Random(0), set[Cell]()

        def wanted(cell: Cell) -> bool:
            walls = [wall for wall, _ in self.times.get(cell, [])]
            return len(walls) < rounds and sum(walls) < most_ms

        while order := sorted(filter(wanted, calls)):
            shuffler.shuffle(order)
            for done, cell in enumerate(order):
                self.left = len(order)
                if time.monotonic() > end:
                    return False
                progress(f"gamma {cell.gamma}, batch {cell.images}: {done} of {len(order)}")
                spent = timed(calls[cell])
                if cell not in warm and spent[0] < 1e3 * _LONG_S:
                    spent = timed(calls[cell])
                warm.add(cell)
                self.times.setdefault(cell, []).append(spent)
                self._save()
        return True

    def _save(self) -> None:
        stored = {"key": self._key, "times": list(self.times.items())}
        self._file.write_text(json.dumps(stored), encoding="utf-8")


def timed(call: Call) -> tuple[float, float]:
    """Wall-clock and processor milliseconds of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3
