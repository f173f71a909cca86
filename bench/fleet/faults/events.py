"""A fleet on a Ray cluster of several machines under open load, while its parts are killed, drained and upgraded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import numpy as np

from bench.common.output import FOLDER, Output, Row, progress
from bench.fleet.faults.machines import Machines
from bench.fleet.faults.site import FRONT, SETTLE_S, Site
from bench.fleet.member_load import MemberLoad, steady

_MACHINES, _PER_S = 3, 60.0
_QUICK = ("a node", "a machine", "all nodes")

Event = Callable[[], None]
Measure = Callable[[Site, str, Event], Row]


def faults(output: Output, quick: bool) -> None:
    """A row for each event; each goes on until all nodes are ready again."""

    def events(site: Site) -> Mapping[str, Event]:
        every: dict[str, Event] = {
            "nothing": lambda: time.sleep(10.0),
            "a node joins": site.join,
            "a supervisor killed": site.kill_supervisor,
            "the sidecar killed": site.kill_sidecar,
            "the sidecar's actor killed": site.kill_membership,
            "a machine killed: raylet, node, server": site.kill_machine,
            "a node drained and started again": site.drain,
            "all nodes upgraded, one at a time": site.upgrade,
            "Ray killed on all machines, started anew": site.kill_ray,
        }
        return {name: event for name, event in every.items() if not quick or name.startswith(_QUICK)}

    _measure(output, "faults", events, _until_whole)


def members(output: Output, quick: bool) -> None:
    """A row for each event, repeated until all of its requests are sent. A node joins only once."""
    requests = 2000 if quick else 20000

    def events(site: Site) -> Mapping[str, Event]:
        return {"a node joins": site.join, "a node drained and started again": site.drain, "upgraded": site.upgrade}

    def measure(site: Site, name: str, event: Event) -> Row:
        times = 0
        with MemberLoad(site.members, islice(steady(_PER_S), requests), FRONT) as load:
            while len(load.results) < requests and not (event == site.join and times):
                event()
                site.whole()
                times += 1
            load.wait()
        return {"event": name, "times": times, **_figures(load, "")}

    _measure(output, "members", events, measure)


def _measure(output: Output, part: str, events: Callable[[Site], Mapping[str, Event]], measure: Measure) -> None:
    rows: list[Row] = []
    folder = FOLDER / f"fleet_{part}"
    with Machines(folder / "ray", _MACHINES) as machines:
        site = Site(folder, machines)
        try:
            site.up()
            for name, event in events(site).items():
                progress(name)
                rows.append(measure(site, name, event))
        finally:
            site.down()
    title = f"{_MACHINES} machines, a node with a router front and 2 emulated workers on each; {_PER_S:g} texts/s"
    output.table(f"{title} at all fronts in turn", rows)
    output.data[part] = rows


def _until_whole(site: Site, name: str, event: Event) -> Row:
    """replanned s, whole s: from the event until the sidecar had planned without the lost node, and until all nodes
    were ready again."""
    with MemberLoad(site.members, steady(_PER_S), FRONT) as load:
        time.sleep(SETTLE_S)
        start = time.perf_counter()
        event()
        # Until Ray has noticed, a dead supervisor's last state stands.
        time.sleep(SETTLE_S)
        site.whole()
        whole_s = time.perf_counter() - start
        time.sleep(SETTLE_S)
    killed = site.killed if event == site.kill_machine else ""
    row = {"event": name, **_figures(load, killed), "whole s": whole_s}
    replanned_s = site.take_replanned_s()
    return row if replanned_s is None else row | {"replanned s": replanned_s}


def _figures(load: MemberLoad, killed: str) -> dict[str, object]:
    """held: failed at the front of the node `killed`; failed: at another one."""
    held = sum(one.node == killed for one in load.failed)
    _show(f"{one.node}, {one.began_s:.1f} s: {one.error}" for one in load.failed[:5])
    p98_ms = 1e3 * float(np.percentile([one.took_s for one in load.results], 98))
    return {"requests": len(load.results), "failed": len(load.failed) - held, "held": held, "p98 ms": p98_ms}


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        progress(line)
