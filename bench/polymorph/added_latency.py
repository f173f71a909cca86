"""What server, front, router and worker add to one request. Emulated engines only wait, so they disturb nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.common.text_bench import CHECKPOINT
from bench.polymorph.emulated_server import WORK_FOLDER
from bench.polymorph.fleet import emulated_front, running_fleet
from client import perf_analyzer
from shapeshift.engines import manifest
from shapeshift.engines.execution.engine_set import EngineSet
from shapeshift.engines.providers import lookup
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer

TEXT = "A text of some tokens, neither short nor long, and always the same one."
_FRONTS = {"inline": 0, "resident": 1}
_BINS = (64, 512)


@dataclass(frozen=True)
class AddedLatency:
    """Medians in ms of the bare engine call and, by placement, of requests at concurrency 1; one entry a round."""

    engine: tuple[float, ...]
    through: dict[str, tuple[float, ...]]

    def ms(self, placement: str) -> float:
        """The latency that a placement adds: the median over the rounds."""
        return float(np.median(np.subtract(self.through[placement], self.engine)))


def measure(rounds: int, requests: int) -> AddedLatency:
    """Run perf_analyzer on both placements and the engine in this process, in turn, on the same text."""
    folder = WORK_FOLDER / "added"
    shutil.rmtree(folder, ignore_errors=True)
    bins = ",".join(map(str, _BINS))
    for name, workers in _FRONTS.items():
        count = workers or 2
        repository = emulated_front(
            folder, name, [32], bins=bins, placement=name, workers=count, min_workers=count, max_workers=count
        )
    engines = folder / "build" / "engines" / "inline"
    built = manifest.load(engines)
    engine_set = EngineSet(built)
    runtime = lookup.PROVIDERS[built.provider].open(engines, built.precision, threads=1)
    for entry in built.engines:
        engine_set.add(runtime.engine(entry.tokens, entry.rows), entry)
    ids = TextTokenizer(CHECKPOINT / FILE_NAME, built.max_tokens).encode(TEXT.encode())
    call_ms: list[float] = []
    through: dict[str, list[float]] = {name: [] for name in _FRONTS}
    with running_fleet(folder, (repository,), _FRONTS) as running:
        for _ in range(rounds):
            times = []
            for _ in range(requests):
                before = time.perf_counter()
                engine_set.run([ids])
                times.append(time.perf_counter() - before)
            call_ms.append(float(np.median(times)) * 1e3)
            for name, medians in through.items():
                measured = perf_analyzer.measure(
                    running.server.grpc_url, name, [{"TEXT": [TEXT]}], 1, requests, timeout_s=60.0
                )
                medians.append(float(np.median(measured.latency_ms)))
    return AddedLatency(tuple(call_ms), {name: tuple(medians) for name, medians in through.items()})


def lines(added: AddedLatency) -> Iterator[str]:
    """The table."""
    yield "\nemulated engines: p50 of one request at a time, perf_analyzer"
    yield f"  bare engine call: {np.median(added.engine):.2f} ms"
    for name, medians in added.through.items():
        yield f"  {name}: {np.median(medians):.2f} ms; added: {added.ms(name):.2f} ms"
