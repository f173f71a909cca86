"""A fleet on a local Ray under open load, while its parts are killed, drained and upgraded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from bench.common.output import BUILD, FOLDER, Output, empty, progress
from bench.fleet.member_load import MemberLoad, steady
from bench.polymorph.fleet import emulated_front
from shapeshift.fleet.supervision.node_supervisor import READY
from shapeshift.fleet.supervision.ray_fleet import FLEET_ACTOR, RayFleet
from shapeshift.fleet.supervision.upgrade import UpgradeSettings, upgrade

_WORK_FOLDER = FOLDER / "fleet_faults"
_NODES, _PER_S = 3, 40.0
_FRONT = "encode"
_FIRST_PORT = 27_000
_READY_S, _SETTLE_S = 300.0, 3.0
_FLEET = f"""
name = "faults"
membership = "ray"

[ray]
nodes = {_NODES}
cpus = 0.5
grpc_port = {_FIRST_PORT}
metrics_port = {_FIRST_PORT + 100}
build = "build"
serve = "--models {_FRONT},{_FRONT}_w00 --triton {(BUILD / "triton").resolve()}"
"""


@dataclass(frozen=True)
class Outcome:
    """Requests while something happened. held: failed at the front of a node that was killed; failed: at another one.

    whole_s: seconds from the event until all nodes were ready again.
    """

    event: str
    requests: int
    failed: int
    held: int
    p98_ms: float
    whole_s: float


class _Site:
    """The fleet, and what is done to it."""

    def __init__(self) -> None:
        empty(_WORK_FOLDER)
        emulated_front(_WORK_FOLDER, _FRONT, [32], placement="resident", workers=1, min_workers=1, time_scale="0.1")
        self.file = _WORK_FOLDER / "fleet.toml"
        self.file.write_text(_FLEET)
        self.fleet = RayFleet(self.file)

    def up(self) -> None:
        self.fleet.up()
        self.whole()

    def whole(self) -> None:
        self.fleet.wait(self.fleet.names, READY, _READY_S, progress)

    def kill_supervisor(self) -> None:
        os.kill(self.fleet.actor_pid("node-1"), signal.SIGKILL)

    def kill_membership(self) -> None:
        os.kill(self.fleet.actor_pid(FLEET_ACTOR), signal.SIGKILL)

    def kill_node(self) -> None:
        """The supervisor, what serves the node, and its Triton."""
        pids = [self.fleet.actor_pid("node-1"), self.fleet.statuses(["node-1"])["node-1"].pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def kill_head(self) -> None:
        self.fleet.kill_head()
        self.up()

    def drain(self) -> None:
        self.fleet.drain("node-1", _READY_S, progress)
        self.fleet.start(self.fleet.command_of("node-1"), _READY_S, progress)

    def upgrade(self) -> None:
        commands = [self.fleet.command_of(name) for name in self.fleet.names]
        upgrade(self.fleet, commands, UpgradeSettings(watch_s=5.0, timeout_s=_READY_S), progress)


def measure(output: Output, quick: bool) -> None:
    """A row for each event; each goes on until all nodes are ready again."""
    site = _Site()
    events: dict[str, tuple[Callable[[], None], str]] = {
        "nothing": (lambda: time.sleep(10.0), ""),
        "a supervisor killed": (site.kill_supervisor, ""),
        "membership's actor killed": (site.kill_membership, ""),
        "Ray's head killed, a new one started": (site.kill_head, ""),
        "a node killed: supervisor, server": (site.kill_node, "node-1"),
        "a node drained and started again": (site.drain, ""),
        "all nodes upgraded, one at a time": (site.upgrade, ""),
    }
    if quick:
        events = {name: events[name] for name in list(events)[-3:]}
    outcomes = []
    try:
        site.up()
        for name, (event, killed) in events.items():
            progress(name)
            outcomes.append(_outcome(site, name, event, killed))
    finally:
        site.fleet.down(_READY_S, progress)
    output.say(
        f"\n{_NODES} nodes, one router front and one emulated worker each, {_PER_S:g} texts/s at all fronts in turn"
    )
    output.say(f"  {'event':38}{'requests':>9}{'failed':>8}{'held':>6}{'p98 ms':>9}{'whole after s':>15}")
    for one in outcomes:
        output.say(f"  {one.event:38}{one.requests:9}{one.failed:8}{one.held:6}{one.p98_ms:9.1f}{one.whole_s:15.1f}")
    output.data["faults"] = [asdict(one) for one in outcomes]


def _outcome(site: _Site, name: str, event: Callable[[], None], killed: str) -> Outcome:
    file = _WORK_FOLDER / "fleet" / "node-0" / "fleet.toml"
    with MemberLoad(file, steady(_PER_S), _FRONT) as load:
        time.sleep(_SETTLE_S)
        start = time.perf_counter()
        event()
        # Until Ray has noticed, a dead supervisor's last state stands.
        time.sleep(_SETTLE_S)
        site.whole()
        whole_s = time.perf_counter() - start
        time.sleep(_SETTLE_S)
    held = sum(one.node == killed for one in load.failed)
    for one in load.failed[:5]:
        progress(f"{one.node}, {one.began_s:.1f} s: {one.error}")
    p98_ms = 1e3 * float(np.percentile([one.took_s for one in load.results], 98))
    return Outcome(name, len(load.results), len(load.failed) - held, held, p98_ms, whole_s)
