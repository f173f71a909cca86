"""`make simulate`: the tables and figures of the five papers beside ours, in simulation; docs/papers.md shows them.

Fixed seeds. Where a paper states latencies those are used, else ours. Nothing is served; only solvers and dispatchers
are timed, by the processor time that they take: on each core there is one step of a paper.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from bench.common import public_data
from bench.common.output import Output, name_of_parts, parser, program
from bench.papers import arlo, chameleon, flover, otas, scale, tabi
from bench.papers.findings import Step, measured
from shapeshift.engines.hardware import cores

PAPERS: dict[str, Sequence[Step]] = {
    "arlo": arlo.STEPS,
    "otas": (otas.measure,),
    "flover": (flover.measure,),
    "chameleon": (chameleon.measure,),
    "tabi": (tabi.measure,),
    "scale": (scale.measure,),
}
"""Of each its steps, which know nothing of one another."""
_QUICK = 0.1


@program
def main() -> int:
    """Measure, print, and write tables, verdicts and data to build/bench/."""
    options = parser("papers", __doc__, "a tenth of the simulated time", tuple(PAPERS)).parse_args()
    about = {"seed": options.seed, "data": public_data.described()}
    output = Output("papers", about, name_of_parts("papers", options.parts, tuple(PAPERS)))
    output.data |= {"tables": [], "claims": [], "seconds": dict.fromkeys(options.parts, 0.0)}
    seconds = output.data["seconds"]
    began, scale = time.monotonic(), _QUICK if options.quick else 1.0
    steps = [(paper, step) for paper in options.parts for step in PAPERS[paper]]
    # Each in a process of its own: memory is measured, too.
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        running = [pool.submit(measured, step, paper.capitalize(), scale, options.seed) for paper, step in steps]
        for (paper, _), future in zip(steps, running, strict=True):
            findings, used_s = future.result()
            for text in findings.texts:
                output.say(text)
            output.data["tables"] += findings.tables
            output.data["claims"] += map(asdict, findings.claims)
            seconds[paper] = round(seconds[paper] + used_s, 1)
            # What is measured is not lost with the rest.
            output.save()
    output.say(f"{time.monotonic() - began:.0f} s; of processors, by paper: {seconds}")
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
