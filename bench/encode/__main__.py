"""`make bench`: the `encode` front against its own baselines and against peers, in one run.

    engine set             the front as shipped, through Triton
    DT                     one engine for any shape, a text a call, through Triton
    ST                     every text padded to the longest length, through Triton
    in-process             the engine set and its queue in a process without Triton
    sentence-transformers  the library, one text a call
    infinity ...           its servers over HTTP (not with --quick; its packages go into build/peers)

Every figure is measured in rounds, the systems in random order within a round; ratios are between medians over the
rounds. `foreign` is the number of cores that other processes used meanwhile. The library and infinity compute in f32,
all others in the precision stated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from bench.common import flops
from bench.common.front_variants import ENGINES, dynamic_only, padded, publish_variant
from bench.common.output import BUILD, FOLDER, Output, Row, empty, program, table
from bench.common.server import loaded_server
from bench.common.systems import EncodeWorker, TritonModel
from bench.common.text_bench import CHECKPOINT, LAWS, TextBench, TextScale
from bench.peers.infinity import Engine, infinity_servers
from shapeshift.engines import manifest

QUICK = TextScale(rounds=1, requests=120, open_s=5.0, concurrencies=(1, 8), laws=("short",), peers=())
FULL = TextScale(
    rounds=3, requests=300, open_s=10.0, concurrencies=(1, 8, 32), laws=("short", "long"), peers=("optimum", "torch")
)


OURS, IN_PROCESS, DYNAMIC, STATIC = "engine set", "in-process", "DT", "ST"


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.encode", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: short texts, one round, no peers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", choices=tuple(LAWS), help="only these texts")
    parser.add_argument("--without-peers", action="store_true", help="leave out infinity")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    if options.lengths:
        scale = replace(scale, laws=(options.lengths,))
    built = manifest.load(ENGINES)
    bench = TextBench(scale, options.seed)
    settings = {
        "seed": options.seed,
        "rounds": scale.rounds,
        "precision": built.precision,
        "provider": f"{built.provider} {built.provider_version}",
        "engines": " ".join(entry.name for entry in built.engines),
    }
    output = Output("encode", settings)
    run(bench, built, () if options.without_peers else scale.peers)
    limits = {law: bound_per_second(law, built.precision) for law in scale.laws}
    output.say(tables(bench, limits))
    output.data |= {"cells": bench.records(), "ratios": ratios(bench)}
    output.save()
    return 0


def run(bench: TextBench, built: manifest.Manifest, peers: Sequence[Engine]) -> None:
    """Start all systems, measure them, stop them."""
    repository = FOLDER / "repository"
    empty(repository)
    publish_variant("encode_dt", dynamic_only(built), repository)
    publish_variant("encode_st", padded(built), repository)
    with ExitStack() as stack:
        models = {"encode": len(built.engines), "encode_dt": 1, "encode_st": 1}
        server = stack.enter_context(loaded_server(models, (BUILD / "repository", repository)))
        names = {"encode": OURS, "encode_dt": DYNAMIC, "encode_st": STATIC}
        fronts = [TritonModel(names[model], server.grpc_url, model) for model in models]
        workers = [
            EncodeWorker(IN_PROCESS, "in-process", ENGINES),
            EncodeWorker("sentence-transformers", "sentence-transformers", CHECKPOINT),
        ]
        for worker in workers:
            stack.callback(worker.stop)
        others = stack.enter_context(infinity_servers(peers, CHECKPOINT, BUILD))
        bench.analyzer(server.grpc_url, {OURS: "encode"}, workers[0], (1, 8))
        bench.closed([*fronts, *workers, *others])
        bench.open([*fronts[:2], *others[:1]], capacity_of=DYNAMIC)


def bound_per_second(law: str, precision: str) -> float:
    """Texts a second at the best rate of matrix products on this machine."""
    sample = LAWS[law].sample(np.random.default_rng(0), 4000).tolist()
    return flops.gemm_flops(precision) / flops.encoder_flops(CHECKPOINT, sample)


def tables(bench: TextBench, limits: Mapping[str, float]) -> str:
    """All cells, then the ratios. limits: the bound in texts a second, by length law."""
    shown = [bench.tables(law, limits[law]) for law in bench.scale.laws]
    return "\n".join([*shown, table("ratios", ratios(bench))])


def ratios(bench: TextBench) -> list[Row]:
    """The comparisons between medians of one run: of rates over 1, of latencies below 1, where ours is better."""
    rows: list[Row] = []
    for law in bench.scale.laws:
        alone, loaded = "perf_analyzer 1", "perf_analyzer 8"
        added = bench.percentile(law, alone, OURS, 50) - bench.percentile(law, alone, IN_PROCESS, 50)
        rows.append({"of": f"{law}: ms added by Triton and our backend, p50, one in flight", "value": added})
        share = bench.per_second(law, loaded, OURS) / bench.per_second(law, loaded, IN_PROCESS)
        rows.append({"of": f"{law}: texts/s through Triton over in-process, 8 in flight", "value": share})
        for load in bench.loads(law, DYNAMIC):
            others = [DYNAMIC, STATIC, *(name for name in bench.systems(law, load) if name.startswith("infinity"))]
            for other in [name for name in others if name in bench.systems(law, load)]:
                rate = bench.per_second(law, load, OURS) / bench.per_second(law, load, other)
                p98 = bench.percentile(law, load, OURS, 98) / bench.percentile(law, load, other, 98)
                rows.append({"of": f"{law}, {load}, over {other}: texts/s; p98", "value": rate, "p98": p98})
    return rows


if __name__ == "__main__":
    sys.exit(main())
