"""`generate`'s decode loop against other systems that serve many requests at once, in one run.

    ours                   the decode loop in a process without a server
    ours, through Triton   the `generate` front, a gRPC stream for each request
    ours, plain requests   the `generate_unary` front, a plain gRPC request each: no token before the last
    OpenVINO GenAI         its continuous batching in-process; its packages go into build/peers
    llama.cpp              its batches in-process; compiled into build/peers
    vLLM                   its engine for CPUs in-process, in f32 and bf16; its packages go into build/peers
    static batch           transformers' generate over all requests as one batch
    continuous batching    transformers' own

The part `loads` measures them under many loads, the part `prompts` the time to the first token after long prompts,
one at a time: new ones, and such that share all but their end with one before, for which llama.cpp's worker does
nothing. The part `beams` measures beam search, ours and transformers'.

All run the same Llama of random parameters (110 million, with `--model 1b` a billion) in the same precision (with int8
weights those of transformers run in bf16, or f32 where the CPU has no bf16) and generate exactly the requested number
of tokens, greedily. Ratios are between medians over the rounds. `foreign` is the number of cores that
other processes used meanwhile.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.common.cells import Cells
from bench.common.output import FOLDER, Output, name_of_parts, parser, program
from bench.common.server import loaded_server
from bench.fused_decode import report
from bench.fused_decode.loads import NEW, PROMPT, PROMPTS, Answers, Load, LoadGenerator, figures
from bench.fused_decode.report import ALONE, OURS
from bench.fused_decode.served import GENERATE, GENERATE_UNARY, TritonStreams, TritonUnary, publish
from bench.fused_decode.systems import (
    DecodeWorker,
    Replay,
    genai_command,
    llama_cpp_command,
    ours_command,
    start_workers,
    transformers_command,
    vllm_command,
)
from bench.peers import random_llama
from bench.peers.protocol import MOST_TOKENS
from shapeshift.engines.hardware import cores
from shapeshift.engines.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.fused_decode.settings import QUANTISED, WEIGHT_BITS

TRITON, UNARY = "ours, through Triton", "ours, plain requests"
GENAI, LLAMA_CPP, VLLM = "OpenVINO GenAI", "llama.cpp", "vLLM"
STATIC, CONTINUOUS = "static batch", "continuous batching"
COMMANDS: Mapping[str, Callable[[Path, str, bool], list[str]]] = {
    OURS: ours_command,
    GENAI: genai_command,
    LLAMA_CPP: llama_cpp_command,
    VLLM: vllm_command,
    STATIC: partial(transformers_command, "batches"),
    CONTINUOUS: partial(transformers_command, "continuous"),
}
"""The processes, by the model, the precision, and whether prompts are long."""
RUNTIMES = (OURS, GENAI, LLAMA_CPP, VLLM)
"""Programs that are measured under every load."""
SERVED = (TRITON, UNARY)


@dataclass(frozen=True)
class Scale:
    """How much is measured: `rounds` of each load of `requests`, each answer of `new_tokens`.

    budget_s    no run begins later than this after the first
    flights     further numbers of requests at once, for RUNTIMES
    poisson     the paper's mean gaps in ms, for RUNTIMES and CONTINUOUS
    """

    systems: tuple[str, ...]
    requests: int
    new_tokens: int
    rounds: int
    budget_s: float
    flights: tuple[int, ...] = ()
    poisson: tuple[int, ...] = ()


SCALES = {
    "quick": Scale((OURS, *SERVED, STATIC, CONTINUOUS), 8, 24, 1, 90.0, poisson=(50,)),
    "few": Scale((*RUNTIMES, *SERVED), 32, 128, 3, 170.0, (8,), (50,)),
    "1b": Scale(RUNTIMES, 8, 64, 2, 620.0),
    "all": Scale((*RUNTIMES, *SERVED, STATIC, CONTINUOUS), 32, 128, 3, 2420.0, (2, 4, 8, 16), (50, 750)),
}
PARTS = ("loads", "prompts", "beams")
BEAMS, SEARCHES = 4, 8
SEARCH = f"{SEARCHES} at once, {BEAMS} beams"
"""The load of the part `beams`. Its rate counts the tokens of the answers, not those of all beams."""


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parse = parser("fused_decode", __doc__, "under 3 minutes: short answers, no other runtimes", PARTS, usual=1)
    parse.add_argument("--few", action="store_true", help="few loads: ours in process and in Triton, other runtimes")
    parse.add_argument("--precision", choices=tuple(WEIGHT_BITS), default="f32")
    parse.add_argument("--model", choices=tuple(random_llama.SIZES), default="110m", help="1b: few loads")
    options = parse.parse_args()
    size = random_llama.SIZES[options.model]
    chosen = "1b" if options.model == "1b" else "quick" if options.quick else "few" if options.few else "all"
    scale, start_s = SCALES[chosen], time.monotonic()
    model = random_llama.ensure(FOLDER / f"llama-{options.model}", size)
    settings = {
        "seed": options.seed,
        "precision": options.precision,
        "threads": cores(),
        "model": f"Llama, {size.parameters / 1e6:.1f}M random parameters",
        "prompt_tokens": PROMPT,
        "new_tokens": scale.new_tokens,
        "requests": scale.requests,
        "rounds": scale.rounds,
    }
    output = Output("fused_decode", settings, name_of_parts("fused_decode", options.parts, PARTS[:1]))
    loads = LoadGenerator(options.seed, random_llama.words(model), scale.new_tokens)
    # The budget is that of the loads; a run of quantised weights has no vLLM, which takes checkpoints of its own.
    quantised = options.precision in QUANTISED
    scale = replace(scale, systems=tuple(name for name in scale.systems if not (quantised and name == VLLM)))
    cells = {
        part: Cells(figures, options.seed, scale.budget_s if part == "loads" else math.inf) for part in options.parts
    }
    memory: dict[str, tuple[float, float]] = {}
    for part in options.parts:
        with ExitStack() as stack:
            if part == "beams":
                search(cells[part], loads, scale.rounds, start(stack, model, (OURS, STATIC), options.precision))
                continue
            if part == "prompts":
                names = [name for name in RUNTIMES if name in scale.systems]
                prompts(cells[part], loads, scale.rounds, start(stack, model, names, options.precision, is_long=True))
                continue
            workers = start(stack, model, scale.systems, options.precision)
            systems = {name: worker.replay for name, worker in workers.items()}
            run(cells[part], loads, scale, {**systems, **serve(stack, model, scale.systems, options.precision)})
            memory = {name: worker.memory_mb() for name, worker in workers.items()}
    rows = [row for one in cells.values() for row in report.ratios(one)]
    output.say("\n".join(one.tables() for one in cells.values()))
    output.table(f"ours over others, {options.precision}", rows)
    for name, (now, most) in memory.items():
        output.say(f"memory of the process of {name}: {now:.0f} MiB, at most {most:.0f} MiB")
    output.say(f"took {time.monotonic() - start_s:.0f} s")
    records = [row for one in cells.values() for row in one.records()]
    output.data |= {"cells": records, "ratios": rows}
    output.data["memory_mb"] = memory
    output.save()
    return 0


def start(
    stack: ExitStack, model: Path, names: Collection[str], precision: str, is_long: bool = False
) -> dict[str, DecodeWorker]:
    """The processes of those in `names`, all of which serve; they end with `stack`."""
    commands = {name: command(model, precision, is_long) for name, command in COMMANDS.items() if name in names}
    return start_workers(stack, commands, "decode")


def serve(stack: ExitStack, model: Path, names: Collection[str], precision: str) -> dict[str, Replay]:
    """The clients of our server, which ends with `stack`, where they are in `names`."""
    if not {*names} & {*SERVED}:
        return {}
    repository, tokenizer = FOLDER / "decode-repository", model / TOKENIZER_FILE
    publish(model, precision, repository)
    url = stack.enter_context(loaded_server({GENERATE: 0, GENERATE_UNARY: 0}, (repository,))).grpc_url
    return {
        TRITON: TritonStreams(url, GENERATE, tokenizer).replay,
        UNARY: TritonUnary(url, GENERATE_UNARY, tokenizer).replay,
    }


def run(cells: Cells[Answers], loads: LoadGenerator, scale: Scale, systems: Mapping[str, Replay]) -> None:
    """Measure all cells of the part `loads`."""

    def measure(load: Load, *names: str, title: str = "") -> None:
        runs = {name: partial(systems[name], load) for name in names if name in systems}
        cells.measure(title or load.name, runs)

    for replay in systems.values():
        replay(loads.at_once(2))
    for _ in range(max(2, scale.rounds)):
        measure(loads.at_once(1), *RUNTIMES, title=ALONE)
    for _ in range(scale.rounds):
        measure(loads.at_once(scale.requests), *systems)
        for count in scale.flights:
            measure(loads.at_once(count), *RUNTIMES)
    request_s = cells.figure(ALONE, OURS, "latency_ms") / 1e3
    for paper_ms in scale.poisson:
        for number in range(scale.rounds):
            others = () if number else (CONTINUOUS,)
            measure(loads.poisson(scale.requests, request_s, paper_ms), *RUNTIMES, *others)


def prompts(cells: Cells[Answers], loads: LoadGenerator, rounds: int, workers: Mapping[str, DecodeWorker]) -> None:
    """Measure the first token of one request after another, of a new prompt and of one that shares its beginning."""
    # New memory takes a while when it is first used: the caches are.
    for load in [loads.long_prompt(max(PROMPTS)) for _ in range(MOST_TOKENS // max(PROMPTS))]:
        for worker in workers.values():
            worker.replay(load)
    for tokens in PROMPTS:
        first = loads.long_prompt(tokens)
        shared = first.requests[0].prompt[: tokens - NEW]
        for worker in workers.values():
            worker.replay(first)
        for _ in range(rounds):
            for load in (loads.long_prompt(tokens), loads.long_prompt(tokens, shared)):
                cells.measure(load.name, {name: partial(worker.replay, load) for name, worker in workers.items()})


def search(cells: Cells[Answers], loads: LoadGenerator, rounds: int, workers: Mapping[str, DecodeWorker]) -> None:
    """Measure beam search: ours, and transformers' with all requests in one batch and with one after another."""
    theirs = workers[STATIC].replay
    searching: dict[str, Replay] = {
        OURS: partial(workers[OURS].replay, num_beams=BEAMS),
        "transformers, one batch": partial(theirs, num_beams=BEAMS),
        "transformers, one by one": partial(theirs, num_beams=BEAMS, most=1),
    }
    for replay in searching.values():
        replay(loads.at_once(2))
    for _ in range(rounds):
        load = replace(loads.at_once(SEARCHES), name=SEARCH)
        cells.measure(SEARCH, {name: partial(replay, load) for name, replay in searching.items()})


if __name__ == "__main__":
    sys.exit(main())
