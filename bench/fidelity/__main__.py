"""How well a simulation predicts a server: the same trace served and simulated, front by front.

A real server over the demo's engines. Of each front first come requests one at a time, and all at once (its capacity);
then three traces of a Poisson load at half of that. From what the server reports of the first and the last follow the
times of the simulation. The middle one is simulated as `shapeshift simulate` does it, with nothing fitted to it.
build/bench/fidelity has the scenarios.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.cascade import zoo
from bench.common.foreign_load import ForeignLoad
from bench.common.output import BUILD, Output, Row, empty, parser, program, progress
from bench.common.server import loaded_server
from bench.fidelity import comparison
from bench.fidelity.fronts import REPOSITORY, WORK, Calibration, Cascade, Front, Generator, Images, Sent, Texts
from shapeshift.engines import manifest
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.workloads.trace import Trace

FRONTS: Mapping[str, Callable[[str], Front]] = {
    "encode": Texts,
    "classify_image": Images,
    "classify_text": Cascade,
    "generate": Generator,
    "generate_lora": partial(Generator, is_adapted=True),
}
_LOAD = 0.5
"""Of the capacity."""
_AT_ONCE, _BURST_S, _MOST = 24, 1.5, 2500
"""Requests that make a capacity, or as many as are served in that time; and most of a trace."""
_ALONE, _ALONE_S = 80, 8.0
"""Most requests that come alone, and about how long they take."""


@program
def main() -> int:
    """Measure, print, and write the table to build/bench/."""
    parse = parser("fidelity", __doc__, "under 3 minutes: short traces", tuple(FRONTS))
    parse.add_argument("--seconds", type=float, default=50.0, help="of each trace (%(default)g)")
    options = parse.parse_args()
    seconds = 8.0 if options.quick else options.seconds
    empty(WORK)
    output = Output("fidelity", {"seed": options.seed, "seconds": f"{seconds:g}", "load": f"{_LOAD:.0%} of capacity"})
    chosen = [FRONTS[name](name) for name in options.parts]
    progress("loading the models")
    rows: list[Row] = []
    with loaded_server(models(chosen), (BUILD / "repository", REPOSITORY)) as server:
        for front in chosen:
            rows += measure(server, front, seconds, options.seed)
    output.table("served and simulated (below 0: simulated faster)", rows)
    output.data["rows"] = rows
    output.save()
    return 0


def models(fronts: Sequence[Front]) -> dict[str, int]:
    """The models to load, and how many engines each has."""
    names = [front.model for front in fronts]
    names += [zoo.FRONTS[-1]] if "classify_text" in names else []
    # The others do not say how many they have loaded.
    counted = ("encode", zoo.FRONTS[-1])
    return {name: len(manifest.load(BUILD / "engines" / name).engines) if name in counted else 0 for name in names}


def measure(server: TritonServer, front: Front, seconds: float, seed: int) -> list[Row]:
    """The rows of a front."""
    progress(f"{front.name}: calibration")
    loads, most = capacity(server, front, seed + 1)
    alone = front.send(server, apart(front, loads[0], seed + 1))
    rate = _LOAD * most
    lasts_s = min(seconds, _MOST / rate)
    for kind in range(1, front.mixes):
        loads.append(front.send(server, front.draw(rate, lasts_s / front.mixes, seed + 1, kind)))
    # Around the trace that is predicted: a machine becomes faster and slower.
    before = front.send(server, front.draw(rate, lasts_s / 2, seed + 1))
    progress(f"{front.name}: {rate:.3g} requests a second")
    time.sleep(1.0)
    with ForeignLoad() as foreign:
        sent = front.send(server, front.draw(rate, lasts_s, seed))
    after = front.send(server, front.draw(rate, lasts_s / 2, seed + 2))
    sections = front.sections(Calibration(alone, (before, after), (*loads, before, after)))
    sections = comparison.with_rest(WORK, front, sections, (before, after))
    outcome = comparison.simulated(WORK, front.name, sections, sent)
    rows = [comparison.row(front.name, sent.of_figure(what), outcome, what) for what in front.figures]
    return [{**row, "rate": rate, "foreign": foreign.cores} for row in rows]


def capacity(server: TritonServer, front: Front, seed: int) -> tuple[list[Sent], float]:
    """What was sent, first one request, and how many requests a second are served where they come at once."""
    sent = [front.send(server, at_once(front, seed, 1))]
    count, lasted_s = _AT_ONCE, 0.0
    while lasted_s < _BURST_S / 2 and count <= _MOST:
        sent.append(front.send(server, at_once(front, seed, count)))
        burst_ms = sent[-1].last_ms
        lasted_s = float(np.nanmax(burst_ms)) / 1e3
        rate = np.count_nonzero(~np.isnan(burst_ms)) / lasted_s
        count = int(_BURST_S * rate)
    return sent, rate


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
