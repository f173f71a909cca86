"""`make bench BENCH=polymorph`: placements, allocations and dispatches.

    real         inline and resident beside DT and ST, over the real engines
    emulated     the real server, router and scheduler over workers that wait for measured latencies

Each table says which part it belongs to. Ratios are between figures of one run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from bench.common.front_variants import ENGINES
from bench.common.output import Output, empty, name_of_parts, parser, program
from bench.common.texts import TextBench
from bench.polymorph import real_engines
from bench.polymorph.emulated_server import WORK_FOLDER, Cell
from bench.polymorph.schemes import ALLOCATIONS, DISPATCHES, INFAAS, OURS, PAPER, Scheme
from bench.polymorph.traces import Traffic
from shapeshift.engines import manifest

_DRAWS = 2
PARTS = ("real", "emulated")


class PolymorphBench:
    """The parts of the benchmark, each a method of its name."""

    def __init__(self, quick: bool, seed: int, output: Output) -> None:
        self._quick, self._seed, self._output = quick, seed, output

    def real(self) -> None:
        """Placements over the real engines."""
        built = manifest.load(ENGINES)
        bench = TextBench(self._seed, 60 if self._quick else 160, 1)
        empty(WORK_FOLDER)
        real_engines.measure(bench, built, WORK_FOLDER, (1, 8))
        self._output.say(bench.cells.tables("short texts, "))
        self._output.table(f"real engines, {built.precision}", real_engines.ratios(bench.cells))
        self._output.data["real"] = bench.cells.records()

    def emulated(self) -> None:
        """Allocations under drift, dispatches under bursts, ours against the paper's."""
        both = {"paper": PAPER, "ours": OURS}
        if self._quick:
            self._cell("8 workers", 8, Traffic(0.6, duration_s=12.0), both)
            return
        drift, bursts = Traffic(0.6, duration_s=60.0), Traffic(0.7, bursty=True, drift=0.1, duration_s=40.0)
        self._cell("8 workers, allocations under drift", 8, drift, {**ALLOCATIONS, "INFaaS": INFAAS, "ours": OURS})
        self._cell("8 workers, dispatches under bursts", 8, bursts, DISPATCHES)
        for load in (0.6, 0.7, 0.8):
            # Several draws of one traffic: the tail differs from draw to draw.
            for draw in range(_DRAWS):
                self._cell("8 workers", 8, Traffic(load, drift=0.1, duration_s=40.0), both, seed=self._seed + draw)
        many = Traffic(0.7, drift=0.1, duration_s=100.0)
        self._cell("40 workers, 6 times as slow", 40, many, {"ours": OURS}, slower=6.0)

    def _cell(
        self,
        what: str,
        workers: int,
        traffic: Traffic,
        schemes: Mapping[str, Scheme],
        slower: float = 1.0,
        seed: int | None = None,
    ) -> None:
        cell = Cell(workers, traffic, 10.0 * slower, self._seed if seed is None else seed, slower)
        rows = [measure(name, scheme) for name, scheme in schemes.items() for measure in (cell.served, cell.simulated)]
        self._output.table(f"{what}; {traffic}; {cell.alone()}", rows)
        self._output.data.setdefault("emulated", []).append({"what": what, "traffic": str(traffic), "rows": rows})


@program
def main() -> int:
    """Measure, print, and write table and data to build/bench/."""
    options = parser("polymorph", __doc__, "under 3 minutes: one round, few cells", PARTS).parse_args()
    settings = {
        "seed": options.seed,
        "emulated": "workers wait for the latencies of profiles/minilm-openvino-f32-epyc-zen3.json",
    }
    output = Output("polymorph", settings, name_of_parts("polymorph", options.parts, PARTS))
    bench = PolymorphBench(options.quick, options.seed, output)
    for part in options.parts:
        getattr(bench, part)()
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
