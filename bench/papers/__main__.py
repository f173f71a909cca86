"""`make simulate`: the tables and figures of the five papers beside ours, in simulation; docs/papers.md shows them.

Fixed seeds. Where a paper states latencies those are used, else ours. Nothing is served; only solvers and dispatchers
are timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from bench.common import public_data
from bench.common.output import Output, name_of_parts, parser, program
from bench.papers import arlo, chameleon, flover, otas, scale, tabi
from bench.papers.findings import Findings

PAPERS: dict[str, Callable[[Findings, int], None]] = {
    "arlo": arlo.measure,
    "otas": otas.measure,
    "flover": flover.measure,
    "chameleon": chameleon.measure,
    "tabi": tabi.measure,
    "scale": scale.measure,
}
_QUICK = 0.1


@program
def main() -> int:
    """Measure, print, and write tables, verdicts and data to build/bench/."""
    options = parser("papers", __doc__, "a tenth of the simulated time", tuple(PAPERS)).parse_args()
    about = {"seed": options.seed, "data": public_data.described()}
    output = Output("papers", about, name_of_parts("papers", options.parts, tuple(PAPERS)))
    for paper in options.parts:
        began, spent = time.monotonic(), time.process_time()
        PAPERS[paper](Findings(paper.capitalize(), output, _QUICK if options.quick else 1.0), options.seed)
        took, used = time.monotonic() - began, time.process_time() - spent
        output.data.setdefault("seconds", {})[paper] = round(used, 1)
        output.say(f"{paper}: {took:.0f} s, of the processor {used:.0f} s")
        # What is measured is not lost with the rest.
        output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
