"""A fleet on Ray with emulated workers and a sidecar, and what is done to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from bench.common.output import BUILD, empty, progress
from bench.fleet.machines import Machines
from bench.polymorph.fleet import emulated_front, joined
from shapeshift.errors import ShapeshiftError, TimedOutError
from shapeshift.fleet.supervision.node_process import NodeCommand, NodeProcess
from shapeshift.fleet.supervision.node_supervisor import READY
from shapeshift.fleet.supervision.plan import SIDECAR
from shapeshift.fleet.supervision.ray_fleet import FLEET_ACTOR, RayFleet
from shapeshift.fleet.supervision.upgrade import UpgradeSettings, upgrade
from shapeshift.sidecar import run_files
from shapeshift.triton.embedded import processes, run_record
from shapeshift.triton.embedded.free_ports import free_ports

FRONT = "encode"
SETTLE_S = 3.0
_NAME, _NODES, _WORKERS = "faults", 3, 2
_READY_S = 300.0
_FILE = """
name = "{name}"

[ray]
nodes = {nodes}
cpus = 0.5
grpc_port = {port}
build = "build"
serve = "--models {front} --triton {triton}"
address = "{address}"
"""


class Site:
    """The fleet on `machines`, with its files in `folder`. It begins with one node less than there are machines."""

    killed = "node-1"

    def __init__(self, folder: Path, machines: Machines) -> None:
        empty(folder / "source")
        settings = {"placement": "resident", "workers": _WORKERS, "min_workers": _WORKERS}
        emulated_front(folder, FRONT, [32], 0.1, **settings)
        self._file, self._machines = folder / "fleet.toml", machines
        self._port = next(free_ports())
        self.fleet = self._of(_NODES - 1)
        self._replanned_s: float | None = None

    @property
    def members(self) -> Path:
        """A fleet file with the members alone: that of a node lists the node itself while it is drained, too."""
        return self._sidecar / "fleet.toml"

    @property
    def sidecar_log(self) -> Path:
        """The log of the sidecar that runs."""
        return self._sidecar / "sidecar.log"

    @property
    def _sidecar(self) -> Path:
        return self.fleet.home / SIDECAR

    def _command(self, name: str) -> NodeCommand:
        return NodeCommand(name, self._file, self._file.parent / "build")

    def _of(self, nodes: int) -> RayFleet:
        triton, address = (BUILD / "triton").resolve(), self._machines.address
        text = _FILE.format(name=_NAME, nodes=nodes, port=self._port, front=FRONT, triton=triton, address=address)
        self._file.write_text(text)
        return RayFleet(self._file)

    def up(self) -> None:
        """Start what does not run, and wait until every front sends texts to all workers."""
        self.fleet.up(plan_period_s=60.0)
        self.whole()

    def whole(self) -> None:
        """Wait until every node is ready, and every front sends texts to the workers of all nodes."""
        self.fleet.wait(self.fleet.names, READY, _READY_S, progress)
        workers = float(len(self.fleet.names) * _WORKERS)
        _wait(lambda: all(self._joined(name) == workers for name in self.fleet.names), f"{workers:g} workers")

    def down(self) -> None:
        """Stop all nodes, whether Ray runs or not."""
        try:
            self.fleet.down(_READY_S, progress)
        finally:
            for name in self.fleet.names:
                NodeProcess(self._command(name)).kill()

    def take_replanned_s(self) -> float | None:
        """How long the last event's plan without the lost node took, if it lost one; told once."""
        replanned_s, self._replanned_s = self._replanned_s, None
        return replanned_s

    def join(self) -> None:
        """One more node, on the last machine."""
        self.fleet = self._of(_NODES)
        self.up()

    def kill_supervisor(self) -> None:
        """The actor that supervises a node."""
        os.kill(self.fleet.actor_pid(self.killed), signal.SIGKILL)

    def kill_sidecar(self) -> None:
        """The process of the sidecar."""
        self._kill_for_sidecar(self._sidecar_pid() or 0)

    def kill_membership(self) -> None:
        """The actor that passes membership on and keeps the sidecar."""
        self._kill_for_sidecar(self.fleet.actor_pid(FLEET_ACTOR))

    def kill_machine(self) -> None:
        """Ray, supervisor, `shapeshift serve` and Triton of one machine; it comes back when the rest is replanned."""
        machine = 1 + self.fleet.names.index(self.killed)
        record = run_record.read(self._command(self.killed).run_directory / "server.json")
        assert record is not None
        log = self.sidecar_log
        position = log.stat().st_size
        start = time.perf_counter()
        self._machines.kill(machine)
        for one in (record.owner, record.server):
            processes.kill(one)
        lost = f"node {self.killed} is lost"
        _wait(lambda: lost in log.read_text(errors="replace")[position:], f"the sidecar to plan without {self.killed}")
        self._replanned_s = time.perf_counter() - start
        self._machines.start(machine)

    def drain(self) -> None:
        """A node leaves, and is started again."""
        self.fleet.drain(self.killed, _READY_S, progress)
        self.fleet.start(self.fleet.command_of(self.killed), _READY_S, progress)

    def upgrade(self) -> None:
        """Every node is started anew."""
        commands = [self.fleet.command_of(name) for name in self.fleet.names]
        upgrade(self.fleet, commands, UpgradeSettings(watch_s=5.0), progress)

    def kill_ray(self) -> None:
        """All of Ray at once, head, raylets and supervisors; a new cluster adopts the nodes."""
        self.fleet.kill_head()
        self._machines.kill_all()
        self._machines.start_all()
        self.up()

    def _kill_for_sidecar(self, pid: int) -> None:
        """Kill a process with which the sidecar ends, and wait for the next sidecar."""
        before = self._sidecar_pid()
        os.kill(pid, signal.SIGKILL)
        _wait(lambda: self._sidecar_pid() not in (before, None), "another sidecar")

    def _sidecar_pid(self) -> int | None:
        return run_files.lock_holder(self._sidecar / "fleet" / _NAME)

    def _joined(self, node: str) -> float:
        try:
            return joined(self.fleet.page(node), FRONT)
        except ShapeshiftError:
            return 0.0


def _wait(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _READY_S
    while not is_done():
        if time.monotonic() > deadline:
            raise TimedOutError(f"waited {_READY_S:g} s for {what}")
        time.sleep(0.1)
