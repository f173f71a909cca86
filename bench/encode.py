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
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import bound, report
from bench.cells import CHECKPOINT, LAWS, Bench, Scale
from bench.loads import TritonModel
from bench.peers.infinity import Engine
from bench.systems import Worker, derive, dynamic_only, infinity, padded, triton
from client import hardware
from client.report import head
from shapeshift.engines import manifest
from shapeshift.errors import ShapeshiftError

BUILD = Path("build")
QUICK = Scale(rounds=1, requests=120, open_s=5.0, concurrencies=(1, 8), laws=("short",), peers=())
FULL = Scale(
    rounds=3, requests=300, open_s=10.0, concurrencies=(1, 8, 32), laws=("short", "long"), peers=("optimum", "torch")
)


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


def run(bench: Bench, made: manifest.Manifest, peers: Sequence[Engine]) -> None:
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
        bench.analyzer(server.grpc_url, {"ladder": "encode"}, workers[0], (1, 8))
        bench.closed([*fronts, *workers, *others])
        bench.open([*fronts[:2], *others[:1]], capacity_of="DT")


def bound_per_second(law: str, precision: str) -> float:
    """Texts a second at the best matrix rate of this machine."""
    sample = LAWS[law].sample(np.random.default_rng(0), 4000).tolist()
    return bound.gemm_flops(precision) / bound.encoder_flops(CHECKPOINT, sample)


if __name__ == "__main__":
    sys.exit(main())
