"""Nodes that join, leave, and are upgraded, each under 20,000 requests of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np

from bench.common.output import FOLDER, Output, progress
from bench.fleet.faults.machines import Machines
from bench.fleet.faults.site import FRONT, Site
from bench.fleet.member_load import MemberLoad, steady

_MACHINES, _PER_S = 3, 60.0
_WORK_FOLDER = FOLDER / "fleet_members"


@dataclass(frozen=True)
class Outcome:
    """Requests while an event happened `times` times; failed: those that got an error."""

    event: str
    times: int
    requests: int
    failed: int
    p98_ms: float


def measure(output: Output, quick: bool) -> None:
    """A row for each event. A node joins once; the other events are repeated until all requests are sent."""
    requests = 2000 if quick else 20000
    outcomes = []
    with Machines(_WORK_FOLDER / "ray", _MACHINES) as machines:
        site = Site(_WORK_FOLDER, machines)
        try:
            site.up()
            outcomes.append(_outcome(site, "a node joins", site.join, requests, once=True))
            outcomes.append(_outcome(site, "a node drained and started again", site.drain, requests))
            outcomes.append(_outcome(site, "all nodes upgraded, one at a time", site.upgrade, requests))
        finally:
            site.down()
    output.say(f"\n{_MACHINES} machines as in `faults`; {_PER_S:g} texts/s at all fronts in turn")
    output.say(f"  {'event':36}{'times':>6}{'requests':>9}{'failed':>8}{'p98 ms':>9}")
    for one in outcomes:
        output.say(f"  {one.event:36}{one.times:6}{one.requests:9}{one.failed:8}{one.p98_ms:9.1f}")
    output.data["members"] = [asdict(one) for one in outcomes]


def _outcome(site: Site, name: str, event: Callable[[], None], requests: int, once: bool = False) -> Outcome:
    progress(name)
    times = 0
    with MemberLoad(site.members, islice(steady(_PER_S), requests), FRONT) as load:
        while len(load.results) < requests and not (once and times):
            event()
            site.whole()
            times += 1
        load.wait()
    for one in load.failed[:5]:
        progress(f"{one.node}, {one.began_s:.1f} s: {one.error}")
    p98_ms = 1e3 * float(np.percentile([one.took_s for one in load.results], 98))
    return Outcome(name, times, len(load.results), len(load.failed), p98_ms)
