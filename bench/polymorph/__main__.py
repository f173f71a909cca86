"""`make bench BENCH=polymorph`: placements, allocations, dispatches and faults.

    real         inline, resident, DT and ST over the real engines; 8 one-thread workers with one bin each
    emulated     the real server, router and scheduler over workers that wait for measured latencies
    faults       requests that fail, and how long recovery takes, when bins change or processes are killed
    simulated    the same policies as discrete events, for more workers than a machine can hold

Each table says which part it belongs to. Ratios are between figures of one run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

from bench.common.front_variants import ENGINES
from bench.common.output import Output, empty, name_of_parts
from bench.common.text_bench import TextBench, TextScale
from bench.polymorph import added_latency, emulated_server, faults, real_engines, simulated_cluster
from bench.polymorph.emulated_server import WORK_FOLDER, Cell
from bench.polymorph.schemes import ALLOCATIONS, DISPATCHES, INFAAS, OURS, PAPER, SchemeSettings
from bench.polymorph.traces import Traffic
from shapeshift.engines import manifest
from shapeshift.errors import ShapeshiftError

_DRAWS = 2
PARTS = ("real", "emulated", "faults", "simulated")


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    texts          of the real engines
    processes      one-thread workers over the real engines; 0: none
    all_cells      whether `emulated` measures every cell, of `cell_s` seconds each, or one
    reallocations  changes of bins under load, while at least `requests` texts are served; 0: none
    simulated_s    seconds of each simulation
    """

    texts: TextScale
    processes: int
    all_cells: bool
    cell_s: float
    reallocations: int
    requests: int
    simulated_s: float


QUICK = Scale(TextScale(1, 60, 0.0, (1, 8), ("short",), ()), 0, False, 12.0, 0, 0, 20.0)
FULL = Scale(TextScale(1, 160, 8.0, (1, 8), ("short", "long"), ()), 8, True, 40.0, 20, 10000, 200.0)


class PolymorphBench:
    """The parts of the benchmark, each a method of its name."""

    def __init__(self, scale: Scale, seed: int, output: Output) -> None:
        self._scale, self._seed = scale, seed
        self._output = output

    def real(self) -> None:
        """Placements over the real engines."""
        scale = self._scale
        built = manifest.load(ENGINES)
        bench = TextBench(scale.texts, self._seed)
        empty(WORK_FOLDER)
        real_engines.placements(bench, built, WORK_FOLDER)
        if scale.processes:
            schemes = {
                "paper's allocation + Algorithm 1": PAPER.parameters(),
                "M/D/1 + earliest finish": OURS.parameters(),
            }
            times = real_engines.partitioned(bench, built, WORK_FOLDER, scale.processes, schemes)
            self._output.say(
                f"\n{scale.processes} one-thread workers, one bin each, profiled with all of them busy: {times}"
            )
        self._output.data["real"] = bench.records()
        self._output.say("\n".join(real_engines.lines(bench, built.precision)))
        if scale.reallocations:
            fault = real_engines.reallocations(built, WORK_FOLDER, 4, scale.reallocations, 2000, self._seed)
            self._output.say(f"\n4 workers over real engines, {built.precision}")
            self._output.say("\n".join(faults.lines([fault])))
            self._output.data["real faults"] = asdict(fault)

    def emulated(self) -> None:
        """Allocations under drift, dispatches under bursts, ours against the paper's."""
        cell_s = self._scale.cell_s
        if not self._scale.all_cells:
            self._cell("8 workers", 8, Traffic(0.6, duration_s=cell_s), {"paper": PAPER, "ours": OURS})
            return
        added = added_latency.measure(rounds=5, requests=300)
        self._output.data["added"] = asdict(added)
        self._output.say("\n".join(added_latency.lines(added)))
        drift = Traffic(0.6, duration_s=1.5 * cell_s)
        self._cell("8 workers, allocations under drift", 8, drift, {**ALLOCATIONS, "INFaaS": INFAAS, "ours": OURS})
        bursty = Traffic(0.7, bursty=True, drift=0.1, duration_s=cell_s)
        by_dispatch = {
            name: SchemeSettings("exact", "clamped", False, algorithm) for name, algorithm in DISPATCHES.items()
        }
        self._cell("8 workers, dispatches under bursts", 8, bursty, by_dispatch)
        for load in (0.6, 0.7, 0.8):
            self._against_paper(Traffic(load, drift=0.1, duration_s=cell_s))
        many = Traffic(0.7, drift=0.1, duration_s=2.5 * cell_s)
        self._cell("40 workers, 6 times as slow", 40, many, {"M/D/1 + earliest finish": OURS}, slower=6.0)

    def _against_paper(self, traffic: Traffic) -> None:
        """Compare ours with the paper's on several draws of one traffic: the tail differs from draw to draw."""
        names = {"paper: clamped + Algorithm 1": PAPER, "M/D/1 + earliest finish": OURS}
        ratios: dict[str, list[float]] = {}
        for draw in range(_DRAWS):
            rows = self._cell("8 workers", 8, traffic, names, seed=self._seed + draw)
            for what in ("emulated", "simulated"):
                paper, ours = (row["p98_ms"] for row in rows if row["what"] == what)
                ratios.setdefault(what, []).append(ours / paper)
        for what, of_draws in ratios.items():
            shown = ", ".join(f"{ratio:.2f}" for ratio in of_draws)
            self._output.say(f"  {what}: p98 of ours over the paper's, by draw: {shown}")

    def _cell(
        self,
        what: str,
        workers: int,
        traffic: Traffic,
        schemes: dict[str, SchemeSettings],
        slower: float = 1.0,
        seed: int | None = None,
    ) -> list[dict[str, Any]]:
        cell = Cell(workers, traffic, 10.0 * slower, self._seed if seed is None else seed, slower)
        rows = [measure(name, scheme) for name, scheme in schemes.items() for measure in (cell.served, cell.simulated)]
        self._output.say("\n".join(emulated_server.lines(f"{what}; {traffic}; {cell.alone()}", rows)))
        self._output.data.setdefault("emulated", []).append({"what": what, "traffic": str(traffic), "rows": rows})
        return rows

    def faults(self) -> None:
        """Reallocations and kills under load, on emulated workers."""
        scale = self._scale
        everything = bool(scale.reallocations)
        cases = (("partitioned", 8, 0.5), ("resident", 2, 0.4)) if everything else (("resident", 2, 0.4),)
        for placement, workers, load in cases:
            count = scale.reallocations if placement == "partitioned" else 0
            measured = list(faults.measure(placement, workers, load, self._seed, count, scale.requests, everything))
            self._output.say(f"\nfaults, {workers} emulated workers, {placement}, at {load:.0%} of their time")
            self._output.say("\n".join(faults.lines(measured)))
            rows = [asdict(fault) for fault in measured]
            self._output.data.setdefault("faults", []).append(
                {"workers": workers, "placement": placement, "rows": rows}
            )

    def simulated(self) -> None:
        """The paper's tables and figures as discrete events."""
        for title, rows in simulated_cluster.tables(self._scale.simulated_s, self._seed):
            self._output.say("\n".join(simulated_cluster.lines(title, rows)))
            self._output.data.setdefault("simulated", []).append({"what": title, "rows": rows})


def main() -> int:
    """Measure, print, and write table and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.polymorph", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: one round, few cells")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: got {unknown[0]}; some of {', '.join(PARTS)}")
    settings = {
        "seed": options.seed,
        "emulated": "workers wait for the latencies of profiles/minilm-openvino-f32-epyc-zen3.json",
    }
    output = Output("polymorph", settings, name_of_parts("polymorph", parts, PARTS))
    bench = PolymorphBench(QUICK if options.quick else FULL, options.seed, output)
    try:
        for part in parts:
            getattr(bench, part)()
    except ShapeshiftError as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 2
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
