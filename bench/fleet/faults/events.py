"""A fleet on a Ray cluster of several machines under open load, while its parts are killed, drained and upgraded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from bench.common.output import FOLDER, Output, progress
from bench.fleet.faults.machines import Machines
from bench.fleet.faults.site import FRONT, SETTLE_S, Site
from bench.fleet.member_load import MemberLoad, steady

_MACHINES, _PER_S = 3, 60.0
_WORK_FOLDER = FOLDER / "fleet_faults"


@dataclass(frozen=True)
class Outcome:
    """Requests while something happened. held: failed at the front of a node that was killed; failed: at another one.

    replanned_s, whole_s: seconds from the event until the sidecar had planned without the lost node, and until all
    nodes were ready again.
    """

    event: str
    requests: int
    failed: int
    held: int
    p98_ms: float
    replanned_s: float | None
    whole_s: float


def measure(output: Output, quick: bool) -> None:
    """A row for each event; each goes on until all nodes are ready again."""
    outcomes = []
    with Machines(_WORK_FOLDER / "ray", _MACHINES) as machines:
        site = Site(_WORK_FOLDER, machines)
        events: dict[str, tuple[Callable[[], None], str]] = {
            "nothing": (lambda: time.sleep(10.0), ""),
            "a node joins": (site.join, ""),
            "a supervisor killed": (site.kill_supervisor, ""),
            "the sidecar killed": (site.kill_sidecar, ""),
            "the sidecar's actor killed": (site.kill_membership, ""),
            "a machine killed: raylet, node, server": (site.kill_machine, site.killed),
            "a node drained and started again": (site.drain, ""),
            "all nodes upgraded, one at a time": (site.upgrade, ""),
            "Ray killed on all machines, started anew": (site.kill_ray, ""),
        }
        if quick:
            events = {name: events[name] for name in events if name.startswith(("a node", "a machine", "all nodes"))}
        try:
            site.up()
            for name, (event, killed) in events.items():
                progress(name)
                outcomes.append(_outcome(site, name, event, killed))
        finally:
            site.down()
    output.say(
        f"\n{_MACHINES} machines, a node with a router front and 2 emulated workers on each; {_PER_S:g} texts/s at all "
        "fronts in turn"
    )
    output.say(f"  {'event':42}{'requests':>9}{'failed':>8}{'held':>6}{'p98 ms':>9}{'replanned s':>13}{'whole s':>9}")
    for one in outcomes:
        replanned = "-" if one.replanned_s is None else f"{one.replanned_s:.1f}"
        shown = f"{one.requests:9}{one.failed:8}{one.held:6}{one.p98_ms:9.1f}{replanned:>13}{one.whole_s:9.1f}"
        output.say(f"  {one.event:42}{shown}")
    output.data["faults"] = [asdict(one) for one in outcomes]


def _outcome(site: Site, name: str, event: Callable[[], None], killed: str) -> Outcome:
    with MemberLoad(site.members, steady(_PER_S), FRONT) as load:
        time.sleep(SETTLE_S)
        start = time.perf_counter()
        event()
        # Until Ray has noticed, a dead supervisor's last state stands.
        time.sleep(SETTLE_S)
        site.whole()
        whole_s = time.perf_counter() - start
        time.sleep(SETTLE_S)
    held = sum(one.node == killed for one in load.failed)
    for one in load.failed[:5]:
        progress(f"{one.node}, {one.began_s:.1f} s: {one.error}")
    p98_ms = 1e3 * float(np.percentile([one.took_s for one in load.results], 98))
    return Outcome(name, len(load.results), len(load.failed) - held, held, p98_ms, site.take_replanned_s(), whole_s)
