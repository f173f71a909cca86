"""The actor of a fleet: it passes membership on, and keeps the sidecar running.

Ray starts it again where it ends. It keeps nothing that it cannot read back: membership is what the supervisors say.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from shapeshift.child_process import ChildProcess
from shapeshift.files import replace_private
from shapeshift.fleet.supervision.actors import write_first, write_private
from shapeshift.fleet.supervision.node_supervisor import NodeStatus
from shapeshift.fleet.supervision.plan import SIDECAR, FleetPlan
from shapeshift.loops import Loop

FLEET_ACTOR = "fleet"
_PERIOD_S = 1.0
_ASK_S = 2.0
_FIRST_ANSWERS_S = 15.0


class FleetActor:
    """Passes membership on to every node each second, and keeps the sidecar of the fleet running.

    There is one by its name: Ray gives a name to one actor only, which is the sidecar's lease. nodes: the actor of each
    node. files: the sidecar's certificate. plan_period_s: the sidecar's; None for no sidecar.
    """

    def __init__(
        self, plan: FleetPlan, nodes: dict[str, Any], files: dict[str, bytes], plan_period_s: float | None
    ) -> None:
        import ray

        self._ray = ray
        self._plan = plan
        self._nodes = nodes
        # By node, the state and the control key that its supervisor has told last.
        self._answers: dict[str, tuple[NodeStatus, str]] = {}
        self._folder = plan.home / SIDECAR
        write_first(self._folder, files)
        self._sent: dict[str, str] = {}
        self._sidecar = None if plan_period_s is None else self._make_sidecar(plan_period_s)
        self._is_running = False
        # Not to take nodes out of the list only because this actor is new.
        self._waits_until = time.monotonic() + _FIRST_ANSWERS_S
        self._loop = Loop("membership", self._pass_on, _warn)
        self._loop.start()

    def hosts(self) -> dict[str, str]:
        """By node, the address of its machine."""
        return self._plan.hosts

    def addresses(self) -> dict[str, str]:
        """The address of gRPC of each node that this actor knows."""
        return self._plan.addresses

    def write_files(self, files: dict[str, bytes]) -> None:
        """Replace the sidecar's certificate."""
        write_private(self._folder, files)

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

    def _pass_on(self) -> float:
        """Ask each node for its state, and send the fleet file with the present members to all nodes."""
        self._ask()
        if len(self._answers) < len(self._nodes) and time.monotonic() < self._waits_until:
            return _PERIOD_S
        members = [name for name, (status, _) in self._answers.items() if status.is_member]
        for name, actor in self._nodes.items():
            # A node reads its own addresses in the file, whether it is a member or not.
            text = self._plan.fleet_file(sorted({*members, name}), name)
            actor.write_fleet_file.remote(text)
        if members:
            self._serve_sidecar(members)
        return _PERIOD_S

    def _ask(self) -> None:
        """Ask each supervisor. Where one does not answer, the last state stays: its server may well run."""
        answers = {name: actor.describe.remote() for name, actor in self._nodes.items()}
        self._ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ASK_S)
        for name, answer in answers.items():
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._answers[name] = self._ray.get(answer, timeout=0)

    def _serve_sidecar(self, members: list[str]) -> None:
        if self._sidecar is None:
            return
        keys = {f"{name}.control-key": self._answers[name][1].encode() for name in members}
        write_private(self._folder, keys)
        text = self._plan.fleet_file(members, SIDECAR, {name: Path(f"{name}.control-key") for name in members})
        file = self._folder / "fleet.toml"
        if self._sent.get(SIDECAR) != text:
            replace_private(file, text.encode())
            self._sent[SIDECAR] = text
        if self._is_running:
            self._sidecar.restart_if_ended()
        else:
            self._sidecar.start()
            self._is_running = True


def _warn(text: str) -> None:
    # Ray keeps what its actors write.
    sys.stderr.write(f"{text}\n")
