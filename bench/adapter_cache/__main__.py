"""`make bench BENCH=adapter_cache`: many adapters over one base model; scheduling and caching alone and together.

    server      the `generate_lora` front with 100 adapters of ranks 8 to 128 over a Llama of 110 million random
                parameters, called over gRPC streams
    turns       (only if requested) the default and `fifo` without a cache, more draws, each repeated
    peers       (only if requested) our loop and vLLM in processes, 8 and 64 adapters of rank 16 in memory, each request
                with another one than its neighbour
    chats       (only if requested) simulated: predicted answer lengths, where chats run beside adapters

Lengths are those of the Azure LLM inference trace 2023, scaled to the model; ranks follow a power law; arrivals are
Poisson. All systems of a load get the same requests. `fifo` without a cache is S-LoRA's order.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from functools import partial

from bench.adapter_cache import chats, random_adapters, report, server
from bench.adapter_cache.report import DEFAULT, PLAIN
from bench.adapter_cache.server import ServerBench
from bench.common import public_data
from bench.common.cells import Cells
from bench.common.output import FOLDER, Output, name_of_parts, parser, program
from bench.fused_decode.loads import LoadGenerator, figures
from bench.fused_decode.report import OURS, ratios
from bench.fused_decode.systems import ours_command, start_workers, vllm_command
from bench.peers import random_llama

PARTS = ("server", "turns", "chats", "peers")
USUAL = 1


class AdapterBench:
    """The parts of the benchmark, each a method of its name. loads: of the real server, as shares of its capacity."""

    def __init__(self, quick: bool, seed: int, precision: str, loads: list[float], output: Output) -> None:
        self._quick, self._precision, self._output = quick, precision, output
        self._loads = loads or ([0.8] if quick else [0.65, 0.85])
        self._seeds = [seed * 100 + number for number in range(1 if quick else 3)]

    def server(self) -> None:
        """Measure the real server under each of the loads."""
        draws, count = (1, 30) if self._quick else (3, 150)
        self._serve([PLAIN, DEFAULT] if self._quick else list(server.PARTS), self._loads, draws, 1, count)

    def turns(self) -> None:
        """Measure the real server under the last of the loads, many times."""
        draws, repeats, count = (2, 1, 60) if self._quick else (10, 3, 150)
        self._serve([PLAIN, DEFAULT], self._loads[-1:], draws, repeats, count)

    def _serve(self, systems: list[str], loads: list[float], draws: int, repeats: int, count: int) -> None:
        bench = ServerBench(self._precision)
        capacity = bench.capacity(count)
        self._output.say(f"\n=== server: capacity of {PLAIN}: {capacity:.2f} requests/s")
        for load in loads:
            name, rate = f"load {load:.0%}", load * capacity
            cells = bench.measure(systems, name, rate, draws, repeats, count, self._seeds[0])
            self._output.say(server.tables(cells))
            self._output.data[name] = {system: report.record(runs) for system, runs in server.every(cells).items()}

    def peers(self) -> None:
        """Measure our loop and vLLM's with adapters in memory."""
        model = random_llama.ensure(FOLDER / "llama-110m")
        for count in (8, 64):
            paths = [random_adapters.path(FOLDER / "adapters-of-peers", model, number) for number in range(count)]
            loads = LoadGenerator(self._seeds[0], random_llama.words(model), 24 if self._quick else 64)
            cells = Cells(figures, self._seeds[0])
            with ExitStack() as stack:
                commands = {
                    name: command(model, self._precision, adapters=paths)
                    for name, command in ((OURS, ours_command), ("vLLM", vllm_command))
                }
                workers = start_workers(stack, commands, "lora")
                for worker in workers.values():
                    worker.replay(loads.at_once(count))
                for load in [loads.at_once(of) for _ in range(1 if self._quick else 3) for of in (8, 32)]:
                    runs = {name: partial(worker.replay, load) for name, worker in workers.items()}
                    cells.measure(f"{count} adapters, {load.name}", runs)
            self._output.say(cells.tables())
            self._output.table(f"ours over vLLM, {count} adapters", ratios(cells))
            self._output.data[f"{count} adapters"] = cells.records()

    def chats(self) -> None:
        """Simulate SmolLM2's chats beside its adapters."""
        for name, rows in chats.measure(*((2, 200) if self._quick else (24, 800))).items():
            self._output.table(f"{name}: first token over that of `arrival`", rows)


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parse = parser("adapter_cache", __doc__, "under 3 minutes: one load, one seed, few requests", PARTS, USUAL)
    parse.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parse.add_argument("--loads", nargs="+", type=float, metavar="SHARE", help="of the real server; turns: the last")
    options = parse.parse_args()
    start_s = time.monotonic()
    settings = {
        "seed": options.seed,
        "precision": options.precision,
        "slots": server.SLOTS,
        "lengths": f"trace x {server.SCALE:g}, at most {server.MAX_LENGTH} tokens",
        "data": public_data.described(),
    }
    output = Output("adapter_cache", settings, name_of_parts("adapter_cache", options.parts, PARTS[:USUAL]))
    bench = AdapterBench(options.quick, options.seed, options.precision, options.loads, output)
    for part in options.parts:
        getattr(bench, part)()
    output.say(f"took {time.monotonic() - start_s:.0f} s")
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
