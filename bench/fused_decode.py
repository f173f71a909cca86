"""`generate`'s decode loop against what others do with many requests at once, in one run.

    ours                   the decode loop in a process without a server
    ours, through Triton   the `generate` front, a gRPC stream for each request
    OpenVINO GenAI         its continuous batching in-process; its packages go into build/peers
    static batch           transformers' generate over all requests as one batch
    dynamic, 0.5 s, 2 s    the same over whatever comes within such a window
    continuous batching    transformers' own
    concurrent instances   32 processes of transformers' generate, batch 1, one thread each, that share their weights

All run the same Llama of 110 million random parameters in the same precision and give every request just the
tokens that it wants, the likeliest ones. Systems are measured in random order within a round; ratios are between
medians over the rounds of one run. `foreign` is the share of the machine that other processes used meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import decode_bound, decode_plots, decode_report
from bench.decode_cells import CONTINUOUS, GENAI, INSTANCES, OURS, STATIC, TRITON, WINDOWS, Bench, Scale
from bench.decode_loads import PROMPT, LoadMaker
from bench.decode_systems import (
    DecodeSystem,
    TritonStreams,
    Window,
    Worker,
    genai_command,
    publish,
    transformers_command,
)
from bench.peers import random_llama
from bench.systems import triton
from client import hardware
from client.report import head
from shapeshift.engines.hardware import available_mb, cores
from shapeshift.errors import ShapeshiftError

BUILD = Path("build")
FOLDER = BUILD / "bench"
QUICK = Scale(requests=8, new=24, rounds=1, flights=(), poisson=(50,), fig5=(), lengths=False, budget_s=80.0)
FULL = Scale(
    requests=32,
    new=128,
    rounds=3,
    flights=(2, 4, 8, 16),
    poisson=(50, 750),
    fig5=(20, 100, 200, 400, 1000, 2000, 5000),
    lengths=True,
    budget_s=2400.0,
)
BATCHES = {STATIC: 0.0} | WINDOWS
BATCHING = "batches"
"""The process behind all of these."""
ALL = (TRITON, GENAI, *BATCHES, CONTINUOUS, INSTANCES)
INSTANCE_MB = 100
"""Memory that an instance takes beside the weights that it shares."""
FEWER_INSTANCES = 8


def main() -> int:
    """Run, print, and write tables, data and plots to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.fused_decode", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: short answers, one round, no OpenVINO")
    parser.add_argument("--precision", choices=tuple(decode_bound.BYTES), default="f32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=ALL, default=[], help="beside ours, only these systems")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        bench, model, settings = prepare(options)
        print(head({"settings": settings, "hardware": hardware.describe()}), flush=True)
        before = decode_bound.measure(options.precision)
        with ExitStack() as stack:
            names = options.only or [name for name in ALL if not (options.quick and name == GENAI)]
            run(bench, start(stack, names, options.precision, int(settings["instances"])))
        machine = before.better(decode_bound.measure(options.precision))
    except ShapeshiftError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    sys.stderr.write("\r\033[K")
    limits = decode_report.Limits(machine, decode_bound.Model.read(model), options.precision)
    text = decode_report.tables(bench, limits)
    text += f"took {time.monotonic() - began:.0f} s\n"
    print(text)
    top = head({"settings": settings, "hardware": hardware.describe()})
    (FOLDER / "fused_decode.txt").write_text(f"{top}\n{text}")
    cells = decode_report.cells(bench, limits)
    (FOLDER / "fused_decode.json").write_text(json.dumps({"settings": settings, "cells": cells}, indent=1))
    written = decode_plots.all_of(bench, FOLDER)
    print(f"written: {FOLDER}/fused_decode.txt, fused_decode.json, {', '.join(written)}")
    return 0


def prepare(options: argparse.Namespace) -> tuple[Bench, Path, dict[str, Any]]:
    """The model, what is to be measured, and the settings as they are printed."""
    scale = QUICK if options.quick else FULL
    model = random_llama.ensure(FOLDER / "llama-110m")
    maker = LoadMaker(options.seed, random_llama.words(model), scale.new)
    fitting = scale.requests if available_mb() > scale.requests * INSTANCE_MB else FEWER_INSTANCES
    settings = {
        "command": f"python -m bench.fused_decode {' '.join(sys.argv[1:])}".strip(),
        "seed": options.seed,
        "precision": options.precision,
        "threads": cores(),
        "model": f"Llama, {random_llama.PARAMETERS / 1e6:.1f}M random parameters",
        "prompt_tokens": PROMPT,
        "new_tokens": scale.new,
        "requests": scale.requests,
        "rounds": scale.rounds,
        "instances": min(fitting, scale.requests),
    }
    return Bench(scale, maker, options.seed), model, settings


def start(stack: ExitStack, names: Collection[str], precision: str, instances: int) -> dict[str, DecodeSystem]:
    """The systems in `names`, and ours; they end with `stack`."""
    model, threads, kernels = FOLDER / "llama-110m", cores(), BUILD / "kernels"
    commands = {OURS: [sys.executable, "-m", "bench.decode_ours", str(model), precision, str(kernels)]}
    if GENAI in names:
        commands[GENAI] = genai_command(model, precision, threads, BUILD)
    if CONTINUOUS in names:
        commands[CONTINUOUS] = transformers_command("continuous", model, precision, threads)
    if INSTANCES in names:
        commands[INSTANCES] = transformers_command("instances", model, precision, instances)
    if any(name in names for name in BATCHES):
        commands[BATCHING] = transformers_command("batches", model, precision, threads)
    workers = {}
    for number, (name, command) in enumerate(commands.items()):
        workers[name] = Worker(name, command, FOLDER / "run" / f"decode-{number}.log")
        stack.callback(workers[name].stop)
    systems: dict[str, DecodeSystem] = {name: worker for name, worker in workers.items() if name != BATCHING}
    for name, window_s in BATCHES.items():
        if name in names:
            systems[name] = Window(name, workers[BATCHING], window_s)
    if TRITON in names:
        publish(model, precision, FOLDER / "decode-repository", kernels)
        server = stack.enter_context(triton({"generate": 0}, (FOLDER / "decode-repository",), BUILD))
        systems[TRITON] = TritonStreams(TRITON, server.grpc_url, "generate", model / "tokenizer.json")
    for worker in workers.values():
        worker.wait_ready()
    return systems


def run(bench: Bench, systems: dict[str, DecodeSystem]) -> None:
    """Measure everything."""
    scale, maker = bench.scale, bench.maker

    def named(*names: str) -> Sequence[DecodeSystem]:
        return [systems[name] for name in names if name in systems]

    slow, windows = named(INSTANCES), named(*WINDOWS)
    pair, batching = named(OURS, GENAI), named(STATIC, CONTINUOUS)
    bench.warm_up(list(systems.values()))
    request_s = bench.alone(pair)
    for number in range(scale.rounds):
        beside = slow if number == 0 else []
        bench.measure(maker.at_once(scale.requests), [*pair, *named(TRITON), *batching, *beside])
    bench.beside_busy_loop(maker.at_once(scale.requests), pair)
    for count in scale.flights:
        bench.measure(maker.at_once(count), pair)
    interval = maker.constant(scale.requests, request_s)
    bench.constant = interval.name
    bench.measure(interval, [*named(OURS, TRITON, GENAI, CONTINUOUS), *windows, *slow])
    for paper_ms in scale.poisson:
        load = maker.poisson(scale.requests, request_s, paper_ms)
        bench.poisson[paper_ms] = load.name
        bench.measure(load, [*pair, *named(CONTINUOUS), *windows, *slow])
        for _ in range(scale.rounds - 1):
            bench.measure(maker.poisson(scale.requests, request_s, paper_ms), pair)
    if scale.lengths:
        bench.measure(maker.lengths(scale.requests), [*pair, *batching])
    for paper_ms in scale.fig5:
        load = maker.poisson(scale.requests, request_s, paper_ms)
        bench.poisson[paper_ms] = load.name
        bench.measure(load, named(OURS))


if __name__ == "__main__":
    sys.exit(main())
