"""The actors of a fleet: one supervises each node, one passes membership on and keeps the sidecar running.

Ray starts an actor again that ends. It keeps nothing that it cannot read back: a node's supervisor adopts the node that
runs, and membership is what the supervisors say.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shapeshift.child_process import ChildProcess
from shapeshift.errors import ShapeshiftError
from shapeshift.files import replace_private, replace_text
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.supervision.node_process import NodeCommand
from shapeshift.fleet.supervision.node_supervisor import NodeStatus, NodeSupervisor
from shapeshift.fleet.supervision.plan import FleetPlan, NodePlan
from shapeshift.triton.keys import ensure_key, read_key

FLEET_ACTOR = "fleet"
SIDECAR = "sidecar"
_PERIOD_S = 1.0
_ASK_S = 2.0
_FIRST_ANSWERS_S = 15.0


class NodeActor:
    """Supervises one node on the machine on which Ray places it."""

    def __init__(self, plan: NodePlan, fleet: FleetPlan) -> None:
        write_private(plan.command.file.parent, plan.files)
        self._key_file = plan.command.run_directory / "key"
        ensure_key(self._key_file)
        ensure_fleet_file(plan, fleet)
        self._supervisor = NodeSupervisor(plan.command)

    def describe(self) -> tuple[NodeStatus, str]:
        """The node's state, and its control key, which only the sidecar gets."""
        return self._supervisor.status(), read_key(self._key_file)

    def status(self) -> NodeStatus:
        """The node's state."""
        return self._supervisor.status()

    def write_fleet_file(self, text: str) -> None:
        """Replace the fleet file that the processes of the node watch."""
        self._supervisor.write_fleet_file(text)

    def drain(self) -> None:
        """See `NodeSupervisor.drain`."""
        self._supervisor.drain()

    def command(self) -> NodeCommand:
        """How the node is served, or was before it was stopped."""
        return self._supervisor.command

    def start(self, command: NodeCommand | None = None) -> None:
        """See `NodeSupervisor.start`."""
        self._supervisor.start(command)

    def kill(self) -> None:
        """See `NodeSupervisor.kill`."""
        self._supervisor.kill()

    def pid(self) -> int:
        """The process of this actor."""
        return os.getpid()


class FleetActor:
    """Passes membership on to every node each second, and keeps the sidecar of the fleet running.

    There is one by its name: Ray gives a name to one actor only, which is the sidecar's lease. nodes: the node actors.
    files: the sidecar's certificate. plan_period_s: the sidecar's; None for no sidecar.
    """

    def __init__(
        self, plan: FleetPlan, nodes: dict[str, Any], files: dict[str, bytes], plan_period_s: float | None
    ) -> None:
        self._plan = plan
        self._nodes = nodes
        self._folder = plan.nodes[0].command.file.parent.parent / SIDECAR
        write_private(self._folder, files)
        self._known: dict[str, tuple[NodeStatus, str]] = {}
        self._sent: dict[str, str] = {}
        self._sidecar = None if plan_period_s is None else self._make_sidecar(plan_period_s)
        self._is_running = False
        self._problem = ""
        # Not to take nodes out of the list only because this actor is new.
        self._waits_until = time.monotonic() + _FIRST_ANSWERS_S
        threading.Thread(target=self._run, name="fleet", daemon=True).start()

    def addresses(self) -> dict[str, str]:
        """The address of gRPC of each node that this actor knows."""
        return {one.node.name: one.node.grpc.address for one in self._plan.nodes}

    def pid(self) -> int:
        """The process of this actor."""
        return os.getpid()

    def _make_sidecar(self, plan_period_s: float) -> ChildProcess:
        first = self._plan.nodes[0].command
        options = [
            f"--fleet={self._folder / 'fleet.toml'}",
            f"--build={self._folder}",
            f"--plan-period={plan_period_s}",
        ]
        options.append(f"--repository={first.build / 'repository'}")
        return ChildProcess(SIDECAR, options, self._folder / "sidecar.log")

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._pass_on()
                problem = ""
            except Exception as error:  # noqa: BLE001  a full disk, for one, must not end the membership
                problem = f"{type(error).__name__}: {error}"
            if problem != self._problem:
                # Ray keeps what its actors write.
                sys.stderr.write(f"membership: {problem or 'passed on again'}\n")
                self._problem = problem
            pause.wait(_PERIOD_S)

    def _pass_on(self) -> None:
        """Ask each node for its state, and send the fleet file with the present members to all nodes."""
        import ray

        asked = {name: actor.describe.remote() for name, actor in self._nodes.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ASK_S)
        for name, answer in asked.items():
            # The state of one whose supervisor does not answer stays: its server may well run.
            with contextlib.suppress(ray.exceptions.RayError):
                self._known[name] = ray.get(answer, timeout=0)
        if len(self._known) < len(self._nodes) and time.monotonic() < self._waits_until:
            return
        members = [name for name, (status, _) in self._known.items() if status.is_member]
        for name, actor in self._nodes.items():
            # A node reads its own addresses in the file, whether it is a member or not.
            text = self._plan.fleet_file(sorted({*members, name}), name)
            actor.write_fleet_file.remote(text)
        if members:
            self._serve_sidecar(members)

    def _serve_sidecar(self, members: list[str]) -> None:
        if self._sidecar is None:
            return
        nodes = {one.node.name: one.node for one in self._plan.nodes}
        write_private(self._folder, {f"{name}.control-key": self._known[name][1].encode() for name in members})
        text = self._plan.fleet_file(members, SIDECAR, {name: Path(f"{name}.control-key") for name in nodes})
        file = self._folder / "fleet.toml"
        if self._sent.get(SIDECAR) != text:
            replace_private(file, text.encode())
            self._sent[SIDECAR] = text
        if self._is_running:
            self._sidecar.restart_if_ended()
        else:
            self._sidecar.start()
            self._is_running = True


def ensure_fleet_file(plan: NodePlan, fleet: FleetPlan) -> None:
    """Write the file that tells the node its addresses, unless it is there. One with others is replaced."""
    name, file = plan.node.name, plan.command.file
    with contextlib.suppress(ShapeshiftError):
        listed = {one.name: (one.grpc.address, one.metrics) for one in fleet_settings.read(file, name).nodes}
        if listed.get(name) == (plan.node.grpc.address, plan.node.metrics):
            return
    replace_text(file, fleet.fleet_file([name], name))


def write_private(folder: Path, contents: dict[str, bytes]) -> None:
    """Write files that only their owner can read."""
    for name, content in contents.items():
        replace_private(folder / name, content)
