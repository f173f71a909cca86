"""`generate`'s decode loop against other systems that serve many requests at once, in one run.

    ours                   the decode loop in a process without a server
    ours, through Triton   the `generate` front, a gRPC stream for each request
    ours, plain requests   the `generate_unary` front, a plain gRPC request each: no token before the last
    OpenVINO GenAI         its continuous batching in-process; its packages go into build/peers
    llama.cpp              its batches in-process; compiled into build/peers
    static batch           transformers' generate over all requests as one batch
    continuous batching    transformers' own

The part `loads` measures them under many loads. The part `beams` measures beam search, ours and transformers'.

All run the same Llama of random parameters (110 million, with `--model 1b` a billion) in the same precision (with int8
weights those of transformers run in bf16, or f32 where the CPU has no bf16) and generate exactly the requested number
of tokens, greedily. Systems are measured in random order within a round; ratios are between medians over the rounds of
one run. `foreign` is the share of the machine that other processes used meanwhile.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.common.models import KERNELS
from bench.common.output import BUILD, FOLDER, Output, program
from bench.common.server import loaded_server
from bench.common.worker import Worker
from bench.fused_decode import bound, report
from bench.fused_decode.cells import (
    CONTINUOUS,
    GENAI,
    LLAMA_CPP,
    OURS,
    RUNTIMES,
    STATIC,
    TRITON,
    UNARY,
    DecodeBench,
    Scale,
)
from bench.fused_decode.loads import PROMPT, LoadGenerator, max_length
from bench.fused_decode.served import GENERATE, GENERATE_UNARY, TritonStreams, TritonUnary, publish
from bench.fused_decode.systems import (
    ConfiguredWorker,
    DecodeSystem,
    DecodeWorker,
    genai_command,
    llama_cpp_command,
    transformers_command,
)
from bench.peers import random_llama
from shapeshift.engines.hardware import cores
from shapeshift.engines.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.fused_decode.model.precision import KV_PRECISIONS, WEIGHT_BITS, computed

QUICK = Scale(requests=8, new_tokens=24, rounds=1, poisson=(50,), budget_s=80.0)
FULL = Scale(
    requests=32,
    new_tokens=128,
    rounds=3,
    flights=(2, 4, 8, 16),
    poisson=(50, 750),
    budget_s=2400.0,
)
# Against RUNTIMES alone; the second of the model of a billion parameters.
FEW = Scale(requests=32, new_tokens=128, rounds=3, flights=(8,), poisson=(50,), budget_s=150.0)
LARGE = Scale(requests=8, new_tokens=64, rounds=2, budget_s=600.0)
LONGEST_PROMPT = random_llama.LENGTH - max_length(0)
ALL = (TRITON, UNARY, *RUNTIMES, STATIC, CONTINUOUS)
PARTS = ("loads", "beams")
KEYS = {re.sub(r"[^a-z0-9.]+", "-", name.lower()): name for name in ALL}
"""The systems by the names that --only takes: without commas and spaces."""
BEAMS, SEARCHES = 4, 8
SEARCH = f"{SEARCHES} at once, {BEAMS} beams"
"""The load of the part `beams`. Its rate counts the tokens of the answers, not those of all beams."""


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    options = arguments()
    size = random_llama.SIZES[options.model]
    scale = LARGE if options.model == "1b" else QUICK if options.quick else FEW if options.few else FULL
    start_s = time.monotonic()
    memory: dict[str, tuple[float, float]] = {}
    model = random_llama.ensure(FOLDER / f"llama-{options.model}", size)
    settings = {
        "seed": options.seed,
        "precision": options.precision,
        "kv_precision": options.kv_precision,
        "threads": cores(),
        "model": f"Llama, {size.parameters / 1e6:.1f}M random parameters",
        "prompt_tokens": options.prompt,
        "new_tokens": scale.new_tokens,
        "requests": scale.requests,
        "rounds": scale.rounds,
    }
    output = Output("fused_decode", settings)
    loads = LoadGenerator(options.seed, random_llama.words(model), scale.new_tokens, options.prompt)
    bench = DecodeBench(scale, loads, options.seed)
    machine = bound.measure(options.precision)
    if "loads" in options.parts:
        with ExitStack() as stack:
            systems = start(stack, model, names_of(options), options)
            run(bench, systems)
            memory = {name: one.memory_mb() for name, one in systems.items() if isinstance(one, Worker)}
    if "beams" in options.parts:
        with ExitStack() as stack:
            commands = {
                OURS: ours_command(model, options),
                STATIC: transformers_command("batches", model, options.precision, cores()),
            }
            search(bench, start_workers(stack, commands))
    machine = machine.best_of(bound.measure(options.precision))
    limits = report.Limits(machine, bound.Model.read(model), options.precision, options.kv_precision, options.prompt)
    output.say(report.tables(bench, limits))
    for name, (now, most) in memory.items():
        output.say(f"memory of the process of {name}: {now:.0f} MiB, at most {most:.0f} MiB")
    output.say(f"took {time.monotonic() - start_s:.0f} s")
    output.data |= {"machine": vars(machine), "cells": report.cells(bench), "ratios": report.ratios(bench, limits)}
    output.data["memory_mb"] = memory
    output.save()
    return 0


def arguments() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.fused_decode", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: short answers, one round, no RUNTIMES")
    parser.add_argument("--few", action="store_true", help="few loads: ours in process and in Triton, other runtimes")
    parser.add_argument("--precision", choices=tuple(WEIGHT_BITS), default="f32")
    parser.add_argument("--kv-precision", choices=KV_PRECISIONS, default="auto", help="of our cache and the runtimes'")
    parser.add_argument("--model", choices=tuple(random_llama.SIZES), default="110m", help="1b: few loads, RUNTIMES")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens of each prompt, 1 to {LONGEST_PROMPT}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all, with --quick only loads")
    parser.add_argument("--only", nargs="+", choices=tuple(KEYS), default=[], help="beside ours, only these systems")
    options = parser.parse_args()
    if not 1 <= options.prompt <= LONGEST_PROMPT:
        parser.error(f"--prompt: must be 1 to {LONGEST_PROMPT}")
    options.parts = options.parts or PARTS[: 1 if options.quick or options.few or options.model == "1b" else None]
    return options


def names_of(options: argparse.Namespace) -> list[str]:
    """The systems to measure beside ours."""
    if options.only:
        return [KEYS[key] for key in options.only]
    if options.model == "1b":
        return [*RUNTIMES]
    if options.few:
        return [TRITON, UNARY, *RUNTIMES]
    return [name for name in ALL if not (options.quick and name in RUNTIMES)]


def ours_command(model: Path, options: argparse.Namespace) -> list[str]:
    """Our decode loop as a process."""
    words = (model, options.precision, options.kv_precision, KERNELS, max_length(options.prompt))
    return [sys.executable, "-m", "bench.fused_decode.inprocess_worker", *map(str, words)]


def start(
    stack: ExitStack, model: Path, names: Collection[str], options: argparse.Namespace
) -> dict[str, DecodeSystem]:
    """Start ours and the systems in `names`; they end with `stack`."""
    precision, kv_precision, length = options.precision, options.kv_precision, max_length(options.prompt)
    commands = {OURS: ours_command(model, options)}
    if GENAI in names:
        commands[GENAI] = genai_command(model, precision, kv_precision, cores(), BUILD)
    if LLAMA_CPP in names:
        commands[LLAMA_CPP] = llama_cpp_command(model, precision, kv_precision, length, cores(), BUILD)
    if CONTINUOUS in names:
        commands[CONTINUOUS] = transformers_command("continuous", model, computed(precision), cores())
    if STATIC in names:
        commands[STATIC] = transformers_command("batches", model, computed(precision), cores())
    systems: dict[str, DecodeSystem] = {**start_workers(stack, commands)}
    if TRITON in names or UNARY in names:
        publish(model, precision, kv_precision, length, FOLDER / "decode-repository")
        models = {GENERATE: 0, GENERATE_UNARY: 0}
        url = stack.enter_context(loaded_server(models, (FOLDER / "decode-repository",))).grpc_url
        systems[TRITON] = TritonStreams(TRITON, url, GENERATE, model / TOKENIZER_FILE)
        systems[UNARY] = TritonUnary(UNARY, url, GENERATE_UNARY, model / TOKENIZER_FILE)
    return systems


def start_workers(stack: ExitStack, commands: dict[str, list[str]]) -> dict[str, DecodeWorker]:
    """A process for each command, all of which serve; they end with `stack`."""
    workers = {}
    for number, (name, command) in enumerate(commands.items()):
        workers[name] = DecodeWorker(name, command, FOLDER / "run" / f"decode-{number}.log")
        stack.callback(workers[name].stop)
    for worker in workers.values():
        worker.wait_ready()
    return workers


def run(bench: DecodeBench, systems: dict[str, DecodeSystem]) -> None:
    """Measure all cells of the part `loads`."""
    scale, loads = bench.scale, bench.loads

    def named(*names: str) -> Sequence[DecodeSystem]:
        return [systems[name] for name in names if name in systems]

    pair, batching = named(OURS, *RUNTIMES), named(STATIC, CONTINUOUS)
    bench.warm_up(list(systems.values()))
    request_s = bench.alone(pair)
    for _ in range(scale.rounds):
        bench.measure(loads.at_once(scale.requests), [*pair, *named(TRITON, UNARY), *batching])
        for count in scale.flights:
            bench.measure(loads.at_once(count), pair)
    for paper_ms in scale.poisson:
        for number in range(scale.rounds):
            others = named(CONTINUOUS) if number == 0 else []
            bench.measure(loads.poisson(scale.requests, request_s, paper_ms), [*pair, *others])


def search(bench: DecodeBench, workers: dict[str, DecodeWorker]) -> None:
    """Measure beam search: ours, and transformers' with all requests in one batch and with one after another."""
    searching = [
        ConfiguredWorker(OURS, workers[OURS], num_beams=BEAMS),
        ConfiguredWorker("transformers, one batch", workers[STATIC], num_beams=BEAMS),
        ConfiguredWorker("transformers, one by one", workers[STATIC], num_beams=BEAMS, most=1),
    ]
    bench.warm_up(searching)
    for _ in range(bench.scale.rounds):
        bench.measure(replace(bench.loads.at_once(SEARCHES), name=SEARCH), searching)


if __name__ == "__main__":
    sys.exit(main())
