"""`make bench BENCH=adapter_cache`: many adapters over one base, scheduling and caching in parts and together.

    server      the `generate_lora` front with 100 adapters of ranks 8 to 128 over a Llama of 110 million random
                parameters, asked over gRPC streams
    simulated   the same policies over iterations that take what a linear law says: no server, no tensor
    turns       (only where asked for) the default and `fifo` without a cache in one server, the same draws in turn

Lengths are those of the Azure LLM inference trace 2023, scaled to the model; ranks follow a power law; arrivals are
Poisson. All systems of a load get the same requests. `fifo` without a cache is S-LoRA's order.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import adapter_evictions, adapter_turns
from bench import adapter_report as report
from bench import adapter_server as served
from bench import adapter_simulated as simulated
from bench.adapter_turns import Turns
from client import hardware
from client.report import head
from shapeshift.errors import ShapeshiftError

FOLDER = Path("build/bench")
PARTS = ("simulated", "server")
ALL_PARTS = (*PARTS, "turns")


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    simulated_loads, loads  shares of what `fifo` without a cache serves when all requests are there at once
    simulated_count, count  requests of each run
    uses                    of adapters, where evictions are compared alone
    seeds                   runs of each cell
    further                 whether other orders, evictions, prefetch and predictors are compared, and all regimes
    budget_s                of the server's part: afterwards no further round begins
    turns                   under the last of `loads`, in the part of that name
    """

    simulated_loads: tuple[float, ...]
    simulated_count: int
    uses: int
    loads: tuple[float, ...]
    count: int
    seeds: int
    further: bool
    budget_s: float
    turns: Turns


QUICK = Extent((0.9, 1.1), 300, 4000, (0.8,), 30, 1, False, 75.0, Turns(2, 1, 60))
FULL = Extent((0.9, 1.05, 1.2), 500, 20000, (0.65, 0.85), 150, 3, True, 1900.0, Turns(10, 3, 150))


class Run:
    """One run: prints each table as it comes, and keeps everything for the files."""

    def __init__(self, extent: Extent, seed: int, precision: str) -> None:
        self._extent, self._precision = extent, precision
        self._seeds = [seed * 100 + number for number in range(extent.seeds)]
        self.text: list[str] = []
        self.data: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """Print a part of the result."""
        self.text.append(text)
        print(text, flush=True)

    def simulated(self) -> None:
        """Three regimes; what is scarce differs."""
        extent = self._extent
        regimes = simulated.regimes()
        self.say(adapter_evictions.measure(regimes[0].known, regimes[0].kept_bytes, extent.uses, self._seeds))
        for regime in regimes if extent.further else regimes[-1:]:
            text = simulated.measure(
                regime, extent.simulated_loads, extent.simulated_count, self._seeds, extent.further
            )
            self.say(text)

    def server(self) -> None:
        """The real server."""
        extent = self._extent
        bench = served.Bench(self._precision, extent.budget_s, _note)
        capacity = bench.capacity(extent.count)
        rates = {load: load * capacity for load in extent.loads}
        ends = {name: served.PARTS[name] for name in (report.PLAIN, report.DEFAULT)}
        for seed in self._seeds:
            bench.measure(served.PARTS if extent.further else ends, rates, extent.count, seed)
        if extent.further:
            bench.measure(served.FURTHER, rates, extent.count, self._seeds[0])
        sys.stderr.write("\r\033[K")
        self.say(f"\n=== server: capacity of {report.PLAIN}: {capacity:.2f} requests/s")
        for load in extent.loads:
            self._of_load(f"load {load:.0%}", bench.of(load))
        self.say(f"not measured, out of time: {'; '.join(bench.skipped) or 'nothing'}")

    def turns(self) -> None:
        """The real server under the last of the loads, in turns."""
        own, load = self._extent.turns, self._extent.loads[-1]
        bench = served.Bench(self._precision, self._extent.budget_s, _note)
        rate = load * bench.capacity(own.count)
        runs = adapter_turns.measure(bench, rate, own, self._seeds[0], _note)
        sys.stderr.write("\r\033[K")
        self.say(adapter_turns.table(f"in turns, load {load:.0%} ({rate:.2f} requests/s)", runs))
        self.data["turns"] = {
            name: [[report.record([run]) for run in of_draw] for of_draw in draws.values()]
            for name, draws in runs.items()
        }

    def _of_load(self, title: str, found: dict[str, report.Runs]) -> None:
        """What the systems came to under one load. Those of `FURTHER` have one draw: all are shown in that, too."""
        whole = {name: runs for name, runs in found.items() if name in served.PARTS}
        if report.PLAIN not in whole:
            return
        self.say(report.table(f"{title}, draws: {len(whole[report.PLAIN])}", whole))
        for name in (report.DEFAULT, report.QUEUES):
            if name in whole:
                self.say(report.by_rank(found[name], found[report.PLAIN], (name, report.PLAIN)))
        if whole.keys() != found.keys():
            self.say(report.table(f"{title}, the first draw", {name: runs[:1] for name, runs in found.items()}))
        self.data[title] = {name: report.record(runs) for name, runs in found.items()}


def _note(text: str) -> None:
    sys.stderr.write(f"\r\033[K{text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and write tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapter_cache", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: one load, one seed, few requests")
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=ALL_PARTS, default=list(PARTS))
    parser.add_argument("--loads", nargs="+", type=float, metavar="SHARE", help="of the real server; turns: the last")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    extent = QUICK if options.quick else FULL
    run = Run(replace(extent, loads=tuple(options.loads or extent.loads)), options.seed, options.precision)
    settings = {
        "command": f"python -m bench.adapter_cache {' '.join(sys.argv[1:])}".strip(),
        "seed": options.seed,
        "precision": options.precision,
        "slots": served.SLOTS,
        "lengths": f"trace x {served.SCALE:g}, at most {served.MAX_LENGTH} tokens",
    }
    top = head({"settings": settings, "hardware": hardware.describe()})
    print(top, flush=True)
    try:
        for part in options.parts:
            getattr(run, part)()
    except ShapeshiftError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    run.say(f"took {time.monotonic() - began:.0f} s")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "adapter_cache.txt").write_text("\n".join([top, *run.text]) + "\n")
    (FOLDER / "adapter_cache.json").write_text(json.dumps({"settings": settings, **run.data}, indent=1))
    print(f"written: {FOLDER}/adapter_cache.txt, adapter_cache.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
