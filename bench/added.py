"""What server, front, router and worker add to one request, over engines that wait and so disturb nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.cells import CHECKPOINT
from bench.emulated import HOUSE
from bench.fleet import emulated_front, fleet
from client import perf_analyzer
from shapeshift.engines import manifest, registry
from shapeshift.engines.ladder import Ladder
from shapeshift.engines.tokenizer import FILE_NAME, TextTokenizer

TEXT = "A text of some tokens, neither short nor long, and always the same one."
_FRONTS = {"inline": 0, "resident": 1}
_BINS = (64, 512)


@dataclass(frozen=True)
class Added:
    """Medians, ms: of the bare engine call, and of requests at concurrency 1, by placement; one entry a round."""

    engine: tuple[float, ...]
    through: dict[str, tuple[float, ...]]

    def ms(self, placement: str) -> float:
        """The median over the rounds of what is added."""
        return float(np.median(np.subtract(self.through[placement], self.engine)))


def measure(rounds: int, requests: int) -> Added:
    """perf_analyzer on both placements and the engine itself in this process, in turn, on the same text."""
    house = HOUSE / "added"
    shutil.rmtree(house, ignore_errors=True)
    bins = ",".join(map(str, _BINS))
    for name, workers in _FRONTS.items():
        count = workers or 2
        repository = emulated_front(
            house, name, [32], bins=bins, placement=name, workers=count, min_workers=count, max_workers=count
        )
    folder = house / "build" / "engines" / "inline"
    made = manifest.load(folder)
    ladder = Ladder(made)
    runtime = registry.provider(made.provider).open(folder, made.precision, threads=1)
    for entry in made.engines:
        ladder.add(runtime.engine(entry.tokens, entry.rows), entry)
    ids = TextTokenizer(CHECKPOINT / FILE_NAME, made.max_tokens).encode(TEXT.encode())
    engine: list[float] = []
    through: dict[str, list[float]] = {name: [] for name in _FRONTS}
    with fleet(house, (repository,), _FRONTS) as running:
        for _ in range(rounds):
            times = []
            for _ in range(requests):
                before = time.perf_counter()
                ladder.run([ids])
                times.append(time.perf_counter() - before)
            engine.append(float(np.median(times)) * 1e3)
            for name, kept in through.items():
                got = perf_analyzer.measure(running.server.grpc_url, name, [TEXT], 1, requests, patience_s=60.0)
                kept.append(float(np.median(got.latency_ms)))
    return Added(tuple(engine), {name: tuple(kept) for name, kept in through.items()})


def lines(added: Added) -> Iterator[str]:
    """The table."""
    yield "\nemulated engines: p50 of one request at a time, perf_analyzer"
    yield f"  bare engine call: {np.median(added.engine):.2f} ms"
    for name, kept in added.through.items():
        yield f"  {name}: {np.median(kept):.2f} ms; added: {added.ms(name):.2f} ms"
