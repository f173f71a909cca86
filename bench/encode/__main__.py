"""`make bench`: the `encode` front against its own baselines and against infinity, short texts, in one run.

    engine set    the front as shipped, through Triton
    native        the same checkpoint on the project's own kernels, through Triton
    DT            one engine for any shape, a text a call, through Triton
    ST            every text padded to the longest length, through Triton; not of engines that compute no padding
    in-process    the engine set and its queue in a process without Triton; "in-process native" those of native
    infinity ...  its servers over HTTP, in f32 (not with --quick, as all peers; their packages go into build/peers)
    sentence-transformers with OpenVINO, vLLM, fastembed
                  in processes without a server, in f32: all texts in flight are one call, as is best for them

In the open loop texts come at random instants, at 80% of what DT answers with 8 in flight. Ratios are between medians
over the rounds. `foreign` is the number of cores that other processes used meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from bench.common.cells import Cells
from bench.common.front_variants import ENGINES, baselines, publish_variant
from bench.common.models import build_encoder
from bench.common.output import BUILD, FOLDER, Output, Row, empty, parser, program
from bench.common.server import loaded_server
from bench.common.texts import CHECKPOINT, InProcess, Outcome, System, TextBench, TritonModel, engines_alone
from bench.encode import libraries
from bench.peers.infinity import infinity_servers
from shapeshift.engines import manifest

OURS, NATIVE, DYNAMIC, STATIC = "engine set", "native", "DT", "ST"
COMPARED = ("per_second", "p50_ms", "p98_ms", "processor_ms")


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    options = parser("encode", __doc__, "under 3 minutes: one round, no peers")
    options.add_argument("--without-peers", action="store_true", help="leave out other programs")
    chosen = options.parse_args()
    requests, rounds, clients = (120, 1, (1, 8)) if chosen.quick else (300, 3, (1, 8, 32))
    built = manifest.load(ENGINES)
    settings = {
        "seed": chosen.seed,
        "rounds": rounds,
        "precision": built.precision,
        "provider": f"{built.provider} {built.provider_version}",
        "engines": " ".join(entry.name for entry in built.engines),
    }
    output = Output("encode", settings)
    bench = TextBench(chosen.seed, requests, rounds)
    run(bench, built, clients, not chosen.quick and not chosen.without_peers)
    output.say(bench.cells.tables("short texts, "))
    output.table("ours over others", ratios(bench.cells))
    output.data |= {"cells": bench.cells.records(), "ratios": ratios(bench.cells)}
    output.save()
    return 0


def run(bench: TextBench, built: manifest.Manifest, clients: Sequence[int], has_peers: bool) -> None:
    """Start all systems, measure them, stop them."""
    repository = FOLDER / "repository"
    empty(repository)
    parameters = {"provider": "native", "precision": built.precision, "bins": "none"}
    native = build_encoder(FOLDER / "encode_native", "encode_native", CHECKPOINT, parameters)
    variants = {f"encode_{name}": entries for name, entries in baselines(built).items()}
    for name, entries in variants.items():
        publish_variant(name, entries, repository)
    with ExitStack() as stack:
        engines = {"encode": len(built.engines), "encode_native": 1, **dict.fromkeys(variants, 1)}
        repositories = (BUILD / "repository", native.generated, repository)
        server = stack.enter_context(loaded_server(engines, repositories))
        names = {"encode": OURS, "encode_native": NATIVE, "encode_dt": DYNAMIC, "encode_st": STATIC}
        fronts = [TritonModel(names[model], server.grpc_url, model) for model in engines]
        bare = [engines_alone(ENGINES), engines_alone(native.engines / "encode_native", "in-process native")]
        for one in bare:
            stack.callback(one.stop)
        bench.analyzed(fronts[:2], bare, (1, 8))
        systems: list[System] = [*fronts, *bare]
        if has_peers:
            systems += stack.enter_context(infinity_servers(("optimum", "torch"), CHECKPOINT, BUILD))
            for name, command in libraries.commands(CHECKPOINT.resolve(), BUILD).items():
                systems.append(library := InProcess(name, command))
                stack.callback(library.stop)
        bench.closed(systems, clients)
        bench.open(fronts[:3], 0.8 * bench.cells.figure("closed 8", DYNAMIC, "per_second"))


def ratios(cells: Cells[Outcome]) -> list[Row]:
    """Ours over every other system: of rates above 1, of latencies and processor time below 1, where ours is better."""
    return cells.ratios((OURS, NATIVE), COMPARED)


if __name__ == "__main__":
    sys.exit(main())
