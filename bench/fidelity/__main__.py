"""How well a simulation predicts a server: the same trace served and simulated, front by front.

A real server over the demo's engines. Of each front first come requests one at a time, all at once (its capacity) and a
Poisson load at half of that; from what the server reports of these follow the times of the simulation. Then another
trace is served, and simulated as `shapeshift simulate` does it, with nothing fitted to it. build/bench/fidelity has the
scenarios.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.common.foreign_load import ForeignLoad
from bench.common.output import BUILD, Output, Row, empty, parser, program, progress
from bench.common.server import loaded_server
from bench.fidelity import comparison, fronts
from bench.fidelity.fronts import REPOSITORY, WORK, Calibration, Front, Sent
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.workloads.trace import Trace

_LOAD = 0.5
"""Of the capacity."""
_AT_ONCE, _MOST = 24, 2500
"""Requests that make a capacity, and most of a trace."""
_ALONE, _ALONE_S = 80, 8.0
"""Most requests that come alone, and about how long they take."""


@program
def main() -> int:
    """Measure, print, and write the table to build/bench/."""
    names = ("encode", "classify_image", "classify_text", "generate", "generate_lora")
    parse = parser("fidelity", __doc__, "under 3 minutes: short traces", names)
    parse.add_argument("--seconds", type=float, default=50.0, help="of each trace (%(default)g)")
    options = parse.parse_args()
    seconds = 8.0 if options.quick else options.seconds
    empty(WORK)
    output = Output("fidelity", {"seed": options.seed, "seconds": f"{seconds:g}", "load": f"{_LOAD:.0%} of capacity"})
    chosen = [front for front in fronts.every() if front.name in options.parts]
    progress("loading the models")
    rows: list[Row] = []
    with loaded_server(fronts.models(chosen), (BUILD / "repository", REPOSITORY)) as server:
        for front in chosen:
            rows += measure(server, front, seconds, options.seed)
    output.table("served and simulated (below 0: simulated faster)", rows)
    output.data["rows"] = rows
    output.save()
    return 0


def measure(server: TritonServer, front: Front, seconds: float, seed: int) -> list[Row]:
    """The rows of a front."""
    progress(f"{front.name}: calibration")
    calibrated, rate = calibrate(server, front, seconds, seed + 1)
    sections = front.sections(calibrated)
    progress(f"{front.name}: {rate:.3g} requests a second")
    time.sleep(1.0)
    with ForeignLoad() as foreign:
        sent = front.send(server, front.draw(rate, min(seconds, _MOST / rate), seed))
    outcome = comparison.simulated(WORK, front.name, sections, sent.trace)
    served = {"last ": sent.last_ms}
    rows = [comparison.row(front.name, served.get(what, sent.first_ms), outcome, what) for what in front.figures]
    return [{**row, "rate": rate, "foreign": foreign.cores} for row in rows]


def calibrate(server: TritonServer, front: Front, seconds: float, seed: int) -> tuple[Calibration, float]:
    """What follows from the calibration: loads, and the rate that is `_LOAD` of the capacity."""
    loads = [front.send(server, at_once(front, seed, count)) for count in (1, _AT_ONCE)]
    burst_ms = loads[-1].last_ms
    capacity = np.count_nonzero(~np.isnan(burst_ms)) / np.nanmax(burst_ms) * 1e3
    alone = front.send(server, apart(front, loads[0], seed))
    rate = float(_LOAD * capacity)
    lasts_s = min(seconds, _MOST / rate)
    loads += [front.send(server, front.draw(rate, lasts_s / front.mixes, seed, kind)) for kind in range(1, front.mixes)]
    loads.append(front.send(server, front.draw(rate, lasts_s, seed)))
    return Calibration(alone, loads), rate


def at_once(front: Front, seed: int, count: int) -> Trace:
    """Requests that all come at the beginning."""
    return _arriving(np.zeros(count), front, seed)


def apart(front: Front, one: Sent, seed: int) -> Trace:
    """Requests of which each has been answered before the next comes, and that wait for no adapter."""
    pause_s = max(_ALONE_S / _ALONE, 2.0 * float(one.last_ms[0]) / 1e3)
    count = max(8, int(_ALONE_S / pause_s))
    return replace(_arriving(np.arange(count) * pause_s, front, seed), lora_name=np.zeros(count, np.str_))


def _arriving(at_s: NDArray[np.float64], front: Front, seed: int) -> Trace:
    """A front's requests at these times."""
    drawn = front.draw(2.0 * _ALONE, 2.0, seed)
    return drawn.resampled(at_s, np.random.default_rng(seed))


if __name__ == "__main__":
    sys.exit(main())
