"""`python -m bench.fleet`: what a fleet keeps through faults, on Ray on this machine.

A fleet on a Ray cluster of several machines is under open load, while its parts are killed, drained and upgraded; each
event goes on until all nodes are ready again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

import numpy as np

from bench.common.foreign_load import ForeignLoad
from bench.common.output import FOLDER, Output, Row, parser, program, progress
from bench.fleet.machines import Machines
from bench.fleet.member_load import MemberLoad, steady
from bench.fleet.site import FRONT, SETTLE_S, Site

_MACHINES, _PER_S = 3, 60.0
FAULTS: Mapping[str, Callable[[Site], None]] = {
    "nothing": lambda site: time.sleep(10.0),
    "a node joins": Site.join,
    "a supervisor killed": Site.kill_supervisor,
    "the sidecar killed": Site.kill_sidecar,
    "the sidecar's actor killed": Site.kill_membership,
    "a machine killed: raylet, node, server": Site.kill_machine,
    "a node drained and started again": Site.drain,
    "all nodes upgraded, one at a time": Site.upgrade,
    "Ray killed on all machines, started anew": Site.kill_ray,
}
_QUICK = ("a node", "a machine", "all nodes")


@program
def main() -> int:
    """Measure, and write table and data to build/bench/."""
    options = parser("fleet", __doc__, "about a minute").parse_args()
    output = Output("fleet", {"nodes": "servers on this machine"})
    with ForeignLoad() as foreign:
        _measure(output, options.quick)
    output.say(f"  cores that other programs used meanwhile: {foreign.cores:.2f}")
    output.save()
    return 0


def _measure(output: Output, quick: bool) -> None:
    rows: list[Row] = []
    folder = FOLDER / "fleet"
    with Machines(folder / "ray", _MACHINES) as machines:
        site = Site(folder, machines)
        try:
            site.up()
            for name, event in FAULTS.items():
                if not quick or name.startswith(_QUICK):
                    progress(name)
                    rows.append(_row(site, name, event))
        finally:
            site.down()
    title = f"{_MACHINES} machines, a node with a router front and 2 emulated workers on each; {_PER_S:g} texts/s"
    output.table(f"{title} at all fronts in turn", rows)
    output.data["faults"] = rows


def _row(site: Site, name: str, event: Callable[[Site], None]) -> Row:
    """What an event costs.

    held: failed at the front of the killed node; failed: at another one. replanned s, whole s: from the event until the
    sidecar had planned without the lost node, and until all nodes were ready again.
    """
    with MemberLoad(site.members, steady(_PER_S), FRONT) as load:
        time.sleep(SETTLE_S)
        start = time.perf_counter()
        event(site)
        # Until Ray has noticed, a dead supervisor's last state stands.
        time.sleep(SETTLE_S)
        site.whole()
        whole_s = time.perf_counter() - start
        time.sleep(SETTLE_S)
    killed = site.killed if event == Site.kill_machine else ""
    held = sum(one.node == killed for one in load.failed)
    for one in load.failed[:5]:
        progress(f"{one.node}, {one.began_s:.1f} s: {one.error}")
    p98_ms = 1e3 * float(np.percentile([one.took_s for one in load.results], 98))
    row = {"event": name, "requests": len(load.results), "failed": len(load.failed) - held}
    row |= {"held": held, "p98 ms": p98_ms, "whole s": whole_s}
    replanned_s = site.take_replanned_s()
    return row if replanned_s is None else row | {"replanned s": replanned_s}


if __name__ == "__main__":
    sys.exit(main())
