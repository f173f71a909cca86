"""`python -m bench.fleet`: what a fleet keeps through faults, on Ray on this machine, and what affinity gains.

faults     a fleet on a Ray cluster of several machines under open load, while its parts are killed, drained and
           upgraded; each event goes on until all nodes are ready again
members    joins, drains and upgrades, repeated until 20,000 requests are sent
affinity   see `bench.fleet.affinity`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from itertools import islice

import numpy as np

from bench.common.foreign_load import ForeignLoad
from bench.common.output import FOLDER, Output, Row, name_of_parts, parser, program, progress
from bench.fleet import affinity
from bench.fleet.machines import Machines
from bench.fleet.member_load import MemberLoad, steady
from bench.fleet.site import FRONT, SETTLE_S, Site

PARTS = ("faults", "members", "affinity")
_MACHINES, _PER_S = 3, 60.0
MEMBERS: Mapping[str, Callable[[Site], None]] = {
    "a node joins": Site.join,
    "a node drained and started again": Site.drain,
    "all nodes upgraded, one at a time": Site.upgrade,
}
FAULTS: Mapping[str, Callable[[Site], None]] = {
    "nothing": lambda site: time.sleep(10.0),
    "a node joins": Site.join,
    "a supervisor killed": Site.kill_supervisor,
    "the sidecar killed": Site.kill_sidecar,
    "the sidecar's actor killed": Site.kill_membership,
    "a machine killed: raylet, node, server": Site.kill_machine,
    **MEMBERS,
    "Ray killed on all machines, started anew": Site.kill_ray,
}
_QUICK = ("a node", "a machine", "all nodes")


@program
def main() -> int:
    """Measure the parts, and write table and data to build/bench/."""
    options = parser("fleet", __doc__, "about a minute a part", PARTS).parse_args()
    output = Output("fleet", {"nodes": "servers on this machine"}, name_of_parts("fleet", options.parts, PARTS))
    for part in options.parts:
        progress(part)
        with ForeignLoad() as foreign:
            if part == "affinity":
                affinity.measure(output, options.quick)
            else:
                _measure(output, part, options.quick)
        output.say(f"  cores that other programs used meanwhile: {foreign.cores:.2f}")
    output.save()
    return 0


def _measure(output: Output, part: str, quick: bool) -> None:
    events, requests = (FAULTS, 0) if part == "faults" else (MEMBERS, 2000 if quick else 20000)
    rows: list[Row] = []
    folder = FOLDER / f"fleet_{part}"
    with Machines(folder / "ray", _MACHINES) as machines:
        site = Site(folder, machines)
        try:
            site.up()
            for name, event in events.items():
                if not quick or name.startswith(_QUICK):
                    progress(name)
                    rows.append(_row(site, name, event, requests))
        finally:
            site.down()
    title = f"{_MACHINES} machines, a node with a router front and 2 emulated workers on each; {_PER_S:g} texts/s"
    output.table(f"{title} at all fronts in turn", rows)
    output.data[part] = rows


def _row(site: Site, name: str, event: Callable[[Site], None], requests: int) -> Row:
    """What an event costs; it is repeated until so many requests are sent, but a node joins only once.

    held: failed at the front of the killed node; failed: at another one. replanned s, whole s: from the last event
    until the sidecar had planned without the lost node, and until all nodes were ready again.
    """
    trace, times, whole_s = islice(steady(_PER_S), requests or None), 0, 0.0
    with MemberLoad(site.members, trace, FRONT) as load:
        while not times or (len(load.results) < requests and event != Site.join):
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            event(site)
            # Until Ray has noticed, a dead supervisor's last state stands.
            time.sleep(SETTLE_S)
            site.whole()
            whole_s, times = time.perf_counter() - start, times + 1
            time.sleep(SETTLE_S)
        if requests:
            load.wait()
    killed = site.killed if event == Site.kill_machine else ""
    held = sum(one.node == killed for one in load.failed)
    for one in load.failed[:5]:
        progress(f"{one.node}, {one.began_s:.1f} s: {one.error}")
    p98_ms = 1e3 * float(np.percentile([one.took_s for one in load.results], 98))
    row = {"event": name, "times": times, "requests": len(load.results), "failed": len(load.failed) - held}
    row |= {"held": held, "p98 ms": p98_ms, "whole s": whole_s}
    replanned_s = site.take_replanned_s()
    return row if replanned_s is None else row | {"replanned s": replanned_s}


if __name__ == "__main__":
    sys.exit(main())
