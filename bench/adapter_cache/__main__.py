"""`make bench BENCH=adapter_cache`: many adapters over one base model; scheduling and caching alone and together.

    server      the `generate_lora` front with 100 adapters of ranks 8 to 128 over a Llama of 110 million random
                parameters, called over gRPC streams
    simulated   the same policies over iterations whose times follow a linear law: no server, no tensors
    turns       (only if requested) the default and `fifo` without a cache in one server, the same draws in turn
    chats       (only if requested) simulated: predicted answer lengths, where chats run beside adapters

Lengths are those of the Azure LLM inference trace 2023, scaled to the model; ranks follow a power law; arrivals are
Poisson. All systems of a load get the same requests. `fifo` without a cache is S-LoRA's order.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.adapter_cache import chats, report, server, simulated, turns
from bench.adapter_cache.server import ServerBench
from bench.adapter_cache.turns import Turns
from bench.common import public_data
from bench.common.output import Output, name_of_parts, program

PARTS = ("simulated", "server")
ALL_PARTS = (*PARTS, "turns", "chats")


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    simulated_loads, loads  shares of the capacity of `fifo` without a cache
    simulated_count, count  requests of each run
    uses                    adapter uses in the comparison of evictions alone
    seeds                   runs of each cell
    full                    whether other orders, evictions, prefetch and predictors, and all regimes are measured
    budget_s                of the server's part: no round begins later
    turns                   of the part of that name, under the last of `loads`
    """

    simulated_loads: tuple[float, ...]
    simulated_count: int
    uses: int
    loads: tuple[float, ...]
    count: int
    seeds: int
    full: bool
    budget_s: float
    turns: Turns


QUICK = Scale((0.9, 1.1), 300, 4000, (0.8,), 30, 1, False, 75.0, Turns(2, 1, 60))
FULL = Scale((0.9, 1.05, 1.2), 500, 20000, (0.65, 0.85), 150, 3, True, 1900.0, Turns(10, 3, 150))


class AdapterBench:
    """The parts of the benchmark, each a method of its name."""

    def __init__(self, scale: Scale, seed: int, precision: str, output: Output) -> None:
        self._scale, self._precision, self._output = scale, precision, output
        self._seeds = [seed * 100 + number for number in range(scale.seeds)]

    def simulated(self) -> None:
        """Simulate three regimes, which differ in their scarce resource."""
        scale = self._scale
        regimes = simulated.regimes()
        self._output.say(
            simulated.measure_evictions(regimes[0].adapters, regimes[0].cache_bytes, scale.uses, self._seeds)
        )
        for regime in regimes if scale.full else regimes[-1:]:
            self._output.say(
                simulated.measure(regime, scale.simulated_loads, scale.simulated_count, self._seeds, scale.full)
            )

    def server(self) -> None:
        """Measure the real server."""
        scale = self._scale
        bench = ServerBench(self._precision, scale.budget_s)
        capacity = bench.capacity(scale.count)
        rates = {load: load * capacity for load in scale.loads}
        ends = {name: server.PARTS[name] for name in (report.PLAIN, report.DEFAULT)}
        for seed in self._seeds:
            bench.measure(server.PARTS if scale.full else ends, rates, scale.count, seed)
        if scale.full:
            bench.measure(server.VARIANTS, rates, scale.count, self._seeds[0])
        self._output.say(f"\n=== server: capacity of {report.PLAIN}: {capacity:.2f} requests/s")
        for load in scale.loads:
            self.say_load(f"load {load:.0%}", bench.of(load))
        self._output.say(f"not measured, out of time: {'; '.join(bench.skipped) or 'nothing'}")

    def turns(self) -> None:
        """Measure the real server under the last of the loads, in turns."""
        scale, load = self._scale.turns, self._scale.loads[-1]
        bench = ServerBench(self._precision, self._scale.budget_s)
        rate = load * bench.capacity(scale.count)
        runs = turns.measure(bench, rate, scale, self._seeds[0])
        self._output.say(turns.tables(f"in turns, load {load:.0%} ({rate:.2f} requests/s)", runs))
        self._output.data["turns"] = {
            name: [[report.record([run]) for run in of_draw] for of_draw in draws.values()]
            for name, draws in runs.items()
        }

    def chats(self) -> None:
        """Simulate SmolLM2's chats beside its adapters."""
        self._output.say(chats.measure(*((24, 800) if self._scale.full else (2, 200))))

    def say_load(self, title: str, runs: dict[str, report.Runs]) -> None:
        """Print the systems under one load. `VARIANTS` have one draw, so all systems are also shown for that draw."""
        whole = {name: runs[name] for name in runs if name in server.PARTS}
        if report.PLAIN not in whole:
            return
        self._output.say(report.systems_table(f"{title}, draws: {len(whole[report.PLAIN])}", whole))
        for name in (report.DEFAULT, report.QUEUES):
            if name in whole:
                rows = report.by_rank(runs[name], runs[report.PLAIN])
                self._output.table(f"{name} over {report.PLAIN}", rows)
                self._output.data.setdefault("ratios", []).append({"load": title, "system": name, "rows": rows})
        if whole.keys() != runs.keys():
            first = {name: of_system[:1] for name, of_system in runs.items()}
            self._output.say(report.systems_table(f"{title}, the first draw", first))
        self._output.data[title] = {name: report.record(of_system) for name, of_system in runs.items()}


@program
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapter_cache", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: one load, one seed, few requests")
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=ALL_PARTS, default=list(PARTS))
    parser.add_argument("--loads", nargs="+", type=float, metavar="SHARE", help="of the real server; turns: the last")
    options = parser.parse_args(arguments)
    start_s = time.monotonic()
    scale = QUICK if options.quick else FULL
    settings = {
        "seed": options.seed,
        "precision": options.precision,
        "slots": server.SLOTS,
        "lengths": f"trace x {server.SCALE:g}, at most {server.MAX_LENGTH} tokens",
        "data": public_data.described(),
    }
    output = Output("adapter_cache", settings, name_of_parts("adapter_cache", options.parts, PARTS))
    scale = replace(scale, loads=tuple(options.loads or scale.loads))
    bench = AdapterBench(scale, options.seed, options.precision, output)
    for part in options.parts:
        getattr(bench, part)()
    output.say(f"took {time.monotonic() - start_s:.0f} s")
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
