"""`make bench BENCH=polymorph`: placements, allocations and dispatches.

    real         inline and resident beside DT and ST, over the real engines
    emulated     the real server, router and scheduler over workers that wait for measured latencies
    simulated    the same policies as discrete events, for more workers than a machine can hold

Each table says which part it belongs to. Ratios are between figures of one run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from bench.common.front_variants import ENGINES
from bench.common.output import Output, Row, empty, name_of_parts, program
from bench.common.text_bench import TextBench, TextScale
from bench.polymorph import real_engines, simulated_cluster
from bench.polymorph.emulated_server import WORK_FOLDER, Cell
from bench.polymorph.schemes import ALLOCATIONS, DISPATCHES, INFAAS, OURS, PAPER, SchemeSettings
from bench.polymorph.traces import Traffic
from shapeshift.engines import manifest

_DRAWS = 2
PARTS = ("real", "emulated", "simulated")


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    texts        of the real engines
    all_cells    whether `emulated` measures every cell, of `cell_s` seconds each, or one
    simulated_s  seconds of each simulation
    """

    texts: TextScale
    all_cells: bool
    cell_s: float
    simulated_s: float


QUICK = Scale(TextScale(1, 60, 0.0, (1, 8), ("short",), ()), False, 12.0, 20.0)
FULL = Scale(TextScale(1, 160, 8.0, (1, 8), ("short", "long"), ()), True, 40.0, 200.0)


class PolymorphBench:
    """The parts of the benchmark, each a method of its name."""

    def __init__(self, scale: Scale, seed: int, output: Output) -> None:
        self._scale, self._seed = scale, seed
        self._output = output

    def real(self) -> None:
        """Placements over the real engines."""
        built = manifest.load(ENGINES)
        bench = TextBench(self._scale.texts, self._seed)
        empty(WORK_FOLDER)
        real_engines.measure(bench, built, WORK_FOLDER)
        for law in self._scale.texts.laws:
            self._output.say(bench.tables(law))
        self._output.table(f"real engines, {built.precision}", real_engines.ratios(bench))
        self._output.data["real"] = bench.records()

    def emulated(self) -> None:
        """Allocations under drift, dispatches under bursts, ours against the paper's."""
        cell_s = self._scale.cell_s
        if not self._scale.all_cells:
            self._cell("8 workers", 8, Traffic(0.6, duration_s=cell_s), {"paper": PAPER, "ours": OURS})
            return
        drift = Traffic(0.6, duration_s=1.5 * cell_s)
        self._cell("8 workers, allocations under drift", 8, drift, {**ALLOCATIONS, "INFaaS": INFAAS, "ours": OURS})
        bursty = Traffic(0.7, bursty=True, drift=0.1, duration_s=cell_s)
        by_dispatch = {name: SchemeSettings("exact", "clamped", algorithm) for name, algorithm in DISPATCHES.items()}
        self._cell("8 workers, dispatches under bursts", 8, bursty, by_dispatch)
        for load in (0.6, 0.7, 0.8):
            # Several draws of one traffic: the tail differs from draw to draw.
            for draw in range(_DRAWS):
                stable = Traffic(load, drift=0.1, duration_s=cell_s)
                self._cell("8 workers", 8, stable, {"paper": PAPER, "ours": OURS}, seed=self._seed + draw)
        many = Traffic(0.7, drift=0.1, duration_s=2.5 * cell_s)
        self._cell("40 workers, 6 times as slow", 40, many, {"ours": OURS}, slower=6.0)

    def _cell(
        self,
        what: str,
        workers: int,
        traffic: Traffic,
        schemes: Mapping[str, SchemeSettings],
        slower: float = 1.0,
        seed: int | None = None,
    ) -> None:
        cell = Cell(workers, traffic, 10.0 * slower, self._seed if seed is None else seed, slower)
        rows: list[Row] = [
            measure(name, scheme) for name, scheme in schemes.items() for measure in (cell.served, cell.simulated)
        ]
        self._output.table(f"{what}; {traffic}; {cell.alone()}", rows)
        self._output.data.setdefault("emulated", []).append({"what": what, "traffic": str(traffic), "rows": rows})

    def simulated(self) -> None:
        """The paper's tables and figures as discrete events."""
        for title, rows in simulated_cluster.tables(self._scale.simulated_s, self._seed):
            self._output.table(f"simulated: {title}", rows)
            self._output.data.setdefault("simulated", []).append({"what": title, "rows": rows})


@program
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
    for part in parts:
        getattr(bench, part)()
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
