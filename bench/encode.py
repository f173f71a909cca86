"""`make bench`: the `encode` front against its own baselines and against peers, in one run.

    ladder                 the front as shipped, through Triton
    DT                     one engine for any shape, a text a call, through Triton
    ST                     every text padded to the longest length, through Triton
    in-process             the ladder's engines and queue in a process without Triton
    sentence-transformers  the library, one text a call
    infinity ...           its servers over HTTP (left out by --quick; its packages go into build/peers)

Every figure is measured in rounds, the systems in random order within a round; ratios are between medians
over the rounds. `foreign` is how many cores other processes kept busy meanwhile. The library and infinity compute
in f32, all others in the precision stated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from bench import bound, report
from bench.foreign import ForeignLoad
from bench.loads import OpenSystem, Outcome, System, TritonModel
from bench.systems import Worker, derive, dynamic_only, infinity, padded, triton
from client import hardware, perf_analyzer
from client.report import head
from shapeshift.engines import manifest
from shapeshift.errors import ShapeshiftError
from shapeshift.workloads import arrivals, lengths
from shapeshift.workloads.text import TextMaker

BUILD = Path("build")
CHECKPOINT = BUILD / "checkpoints" / "all-MiniLM-L6-v2"
LAWS = {"short": lengths.short(), "long": lengths.long()}
ST_SLOWNESS = 8
"""ST and the library get fewer requests a cell by this factor: a cell should last as long as the others'."""


Peer = Literal["torch", "optimum"]


S = TypeVar("S", bound=System)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int
    requests: int
    open_s: float
    concurrencies: tuple[int, ...]
    laws: tuple[str, ...]
    peers: tuple[Peer, ...]


QUICK = Scale(rounds=1, requests=120, open_s=5.0, concurrencies=(1, 8), laws=("short",), peers=())
FULL = Scale(
    rounds=3, requests=300, open_s=10.0, concurrencies=(1, 8, 32), laws=("short", "long"), peers=("optimum", "torch")
)


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

    def analyzer(self, url: str, bare: Worker) -> None:
        """perf_analyzer on the shipped front beside the bare engines, on the same texts, in turn."""
        for law in self.scale.laws:
            for concurrency in (1, 8):
                for _ in range(self.scale.rounds):
                    count = self._count(bare, law)
                    load = f"perf_analyzer {concurrency}"
                    self._keep(law, load, "ladder", partial(_analyze, url, self.texts[law], concurrency, count))
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


def main() -> int:
    """Run, print, and write tables, data and plot to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.encode", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: short texts, one round, no peers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", choices=tuple(LAWS), help="only these texts")
    parser.add_argument("--without-peers", action="store_true", help="leave out infinity")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    if options.lengths:
        scale = replace(scale, laws=(options.lengths,))
    try:
        made = manifest.load(BUILD / "engines" / "encode")
        bench = Bench(scale, options.seed)
        settings: dict[str, Any] = {
            "command": f"python -m bench.encode {' '.join(sys.argv[1:])}".strip(),
            "seed": options.seed,
            "rounds": scale.rounds,
            "precision": made.precision,
            "provider": f"{made.provider} {made.provider_version}",
            "engines": " ".join(entry.name for entry in made.engines),
        }
        print(head({"settings": settings, "hardware": hardware.describe()}), flush=True)
        run(bench, made, () if options.without_peers else scale.peers)
    except ShapeshiftError as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 2
    sys.stderr.write("\r\033[K")
    limits = {law: bound_per_second(law, made.precision) for law in scale.laws}
    text = report.tables(bench, made.precision, limits)
    print(text)
    folder = BUILD / "bench"
    (folder / "encode.txt").write_text(head({"settings": settings, "hardware": hardware.describe()}) + "\n" + text)
    (folder / "encode.json").write_text(json.dumps({"settings": settings, "cells": report.cells(bench)}, indent=1))
    report.plot(bench, folder / "encode.png")
    print(f"written: {folder}/encode.txt, encode.json, encode.png")
    return 0


def run(bench: Bench, made: manifest.Manifest, peers: Sequence[Peer]) -> None:
    """Start everything, measure everything, stop everything."""
    repository = BUILD / "bench" / "repository"
    report.empty(repository)
    derive("encode_dt", dynamic_only(made), repository, BUILD)
    derive("encode_st", padded(made), repository, BUILD)
    with ExitStack() as stack:
        models = {"encode": len(made.engines), "encode_dt": 1, "encode_st": 1}
        server = stack.enter_context(triton(models, (BUILD / "repository", repository), BUILD))
        names = {"encode": "ladder", "encode_dt": "DT", "encode_st": "ST"}
        fronts = [TritonModel(names[model], server.grpc_url, model) for model in models]
        workers = [
            Worker("in-process", "ladder", BUILD / "engines" / "encode"),
            Worker("sentence-transformers", "sentence-transformers", CHECKPOINT),
        ]
        for worker in workers:
            stack.callback(worker.stop)
        others = stack.enter_context(infinity(peers, CHECKPOINT, BUILD))
        bench.analyzer(server.grpc_url, workers[0])
        bench.closed([*fronts, *workers, *others])
        bench.open([*fronts[:2], *others[:1]], capacity_of="DT")


def _analyze(url: str, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
    got = perf_analyzer.measure(url, "encode", texts, concurrency, count)
    return Outcome(got.latency_ms, got.per_second)


def bound_per_second(law: str, precision: str) -> float:
    """Texts a second at the best matrix rate of this machine."""
    sample = LAWS[law].sample(np.random.default_rng(0), 4000).tolist()
    return bound.gemm_flops(precision) / bound.encoder_flops(CHECKPOINT, sample)


if __name__ == "__main__":
    sys.exit(main())
