"""`make bench BENCH=polymorph`: placements, allocations, dispatches and faults.

    real         inline, resident, DT and ST over the real engines; 8 one-thread workers with one bin each
    emulated     the real server, router and scheduler over workers that wait for measured latencies
    faults       what is lost and how long it takes when something changes, dies, or is killed
    simulated    the same policies as discrete events, for more workers than a machine can hold

Each table says which of these it is. Ratios are between figures of one run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import added, cluster, emulated, faults, real, report
from bench.cells import Bench, Scale
from bench.emulated import Cell
from bench.schemes import ALLOCATIONS, DISPATCHES, INFAAS, OURS, PAPER, Named
from bench.traces import Traffic
from client import hardware
from client.report import head
from shapeshift.engines import manifest
from shapeshift.errors import ShapeshiftError

BUILD = Path("build")
_DRAWS = 2
PARTS = ("real", "emulated", "faults", "simulated")


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    scale: Scale
    processes: int
    cells: bool
    cell_s: float
    reallocations: int
    requests: int
    simulated_s: float


QUICK = Extent(Scale(1, 60, 0.0, (1, 8), ("short",), ()), 0, False, 12.0, 0, 0, 20.0)
FULL = Extent(Scale(1, 160, 8.0, (1, 8), ("short", "long"), ()), 8, True, 40.0, 20, 10000, 200.0)


class Run:
    """One run: prints each table as it comes, and keeps everything for the files."""

    def __init__(self, extent: Extent, seed: int) -> None:
        self._extent, self._seed = extent, seed
        self.text: list[str] = []
        self.data: dict[str, Any] = {}

    def say(self, line: str) -> None:
        """Print a line of the result."""
        self.text.append(line)
        print(line, flush=True)

    def real(self) -> None:
        """Placements over the real engines."""
        made = manifest.load(real.ENGINES)
        bench = Bench(self._extent.scale, self._seed)
        house = emulated.clear()
        real.placements(bench, made, house)
        if self._extent.processes:
            schemes = {
                "paper's allocation + Algorithm 1": PAPER.parameters(),
                "M/D/1 + earliest finish": OURS.parameters(),
            }
            times = real.partitioned(bench, made, house, self._extent.processes, schemes)
            self.say(
                f"\n{self._extent.processes} one-thread workers, one bin each, profiled with all of them busy: {times}"
            )
        sys.stderr.write("\r\033[K")
        self.data["real"] = report.cells(bench)
        for line in real.lines(bench, made.precision):
            self.say(line)
        if self._extent.reallocations:
            found = real.reallocations(made, house, 4, self._extent.reallocations, 2000, self._seed)
            self.say(f"\n4 workers over real engines, {made.precision}")
            for line in faults.lines([found]):
                self.say(line)
            self.data["real faults"] = asdict(found)

    def emulated(self) -> None:
        """Allocations under drift, dispatches under bursts, ours against the paper's."""
        drift = Traffic(0.6, duration_s=1.5 * self._extent.cell_s)
        if not self._extent.cells:
            self._cell("8 workers", 8, Traffic(0.6, duration_s=self._extent.cell_s), {"paper": PAPER, "ours": OURS})
            return
        found = added.measure(rounds=5, requests=300)
        self.data["added"] = asdict(found)
        for line in added.lines(found):
            self.say(line)
        self._cell("8 workers, allocations under drift", 8, drift, {**ALLOCATIONS, "INFaaS": INFAAS, "ours": OURS})
        bursty = Traffic(0.7, bursty=True, drift=0.1, duration_s=self._extent.cell_s)
        by_dispatch = {name: Named("exact", "clamped", False, algorithm) for name, algorithm in DISPATCHES.items()}
        self._cell("8 workers, dispatches under bursts", 8, bursty, by_dispatch)
        for load in (0.6, 0.7, 0.8):
            self._against_paper(Traffic(load, drift=0.1, duration_s=self._extent.cell_s))
        many = Traffic(0.7, drift=0.1, duration_s=2.5 * self._extent.cell_s)
        self._cell("40 workers, 6 times as slow", 40, many, {"M/D/1 + earliest finish": OURS}, slower=6.0)

    def _against_paper(self, traffic: Traffic) -> None:
        """Ours and the paper's on several draws of one traffic: at its tail, one draw tells little."""
        names = {"paper: clamped + Algorithm 1": PAPER, "M/D/1 + earliest finish": OURS}
        ratios: dict[str, list[float]] = {}
        for draw in range(_DRAWS):
            rows = self._cell("8 workers", 8, traffic, names, seed=self._seed + draw)
            for what in ("emulated", "simulated"):
                paper, ours = (row["p98_ms"] for row in rows if row["what"] == what)
                ratios.setdefault(what, []).append(ours / paper)
        for what, found in ratios.items():
            self.say(f"  {what}: p98 of ours over the paper's, by draw: {', '.join(f'{ratio:.2f}' for ratio in found)}")

    def _cell(
        self,
        what: str,
        workers: int,
        traffic: Traffic,
        schemes: dict[str, Named],
        slower: float = 1.0,
        seed: int | None = None,
    ) -> list[dict[str, Any]]:
        cell = Cell(workers, traffic, 10.0 * slower, self._seed if seed is None else seed, slower)
        rows = [measure(name, scheme) for name, scheme in schemes.items() for measure in (cell.served, cell.simulated)]
        for line in emulated.lines(f"{what}; {traffic}; {cell.alone()}", rows):
            self.say(line)
        self.data.setdefault("emulated", []).append({"what": what, "traffic": str(traffic), "rows": rows})
        return rows

    def faults(self) -> None:
        """Changes and deaths under load, on emulated workers."""
        extent = self._extent
        whole = bool(extent.reallocations)
        kinds = (("partitioned", 8, 0.5), ("resident", 2, 0.4)) if whole else (("resident", 2, 0.4),)
        for placement, workers, load in kinds:
            counted = extent.reallocations if placement == "partitioned" else 0
            found = list(faults.measure(placement, workers, load, self._seed, counted, extent.requests, whole))
            self.say(f"\nfaults, {workers} emulated workers, {placement}, at {load:.0%} of their time")
            for line in faults.lines(found):
                self.say(line)
            rows = [asdict(one) for one in found]
            self.data.setdefault("faults", []).append({"workers": workers, "placement": placement, "rows": rows})

    def simulated(self) -> None:
        """The paper's tables and figures as discrete events."""
        for title, rows in cluster.tables(self._extent.simulated_s, self._seed):
            for line in cluster.lines(title, rows):
                self.say(line)
            self.data.setdefault("simulated", []).append({"what": title, "rows": rows})


def main() -> int:
    """Run, print, and write table and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.polymorph", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: one round, few cells")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parser.parse_args()
    run = Run(QUICK if options.quick else FULL, options.seed)
    settings: dict[str, Any] = {
        "command": f"python -m bench.polymorph {' '.join(sys.argv[1:])}".strip(),
        "seed": options.seed,
        "emulated": "workers wait for the latencies of profiles/minilm-openvino-f32-epyc-zen3.json",
    }
    begin = head({"settings": settings, "hardware": hardware.describe()})
    print(begin, flush=True)
    try:
        for part in options.parts.split(","):
            steps: dict[str, Callable[[], None]] = {name: getattr(run, name) for name in PARTS}
            if part not in steps:
                parser.error(f"--parts: got {part}; some of {', '.join(PARTS)}")
            steps[part]()
    except ShapeshiftError as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 2
    (BUILD / "bench" / "polymorph.txt").write_text("\n".join([begin, *run.text]) + "\n")
    (BUILD / "bench" / "polymorph.json").write_text(json.dumps({"settings": settings, **run.data}, indent=1))
    print(f"\nwritten: {BUILD}/bench/polymorph.txt, polymorph.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
