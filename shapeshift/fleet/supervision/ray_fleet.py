"""A fleet on Ray, as commands see it: started, asked, drained, upgraded, stopped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.errors import NotFoundError, ShapeshiftError, TimedOutError, did_you_mean
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.membership import NODES_FILE
from shapeshift.fleet.settings import RaySettings
from shapeshift.fleet.supervision import actors as ray_actors
from shapeshift.fleet.supervision import node_process
from shapeshift.fleet.supervision import plan as plans
from shapeshift.fleet.supervision.actors import write_private
from shapeshift.fleet.supervision.cluster import Cluster
from shapeshift.fleet.supervision.fleet_actor import FLEET_ACTOR, FleetActor
from shapeshift.fleet.supervision.node_process import NodeCommand, NodeProcess
from shapeshift.fleet.supervision.node_supervisor import READY, STOPPED, NodeStatus
from shapeshift.fleet.supervision.plan import FleetPlan
from shapeshift.triton import metrics
from shapeshift.triton.metrics import Samples

Say = Callable[[str], None]

OPERATOR = "operator"
_POLL_S = 0.5
_ANSWER_S = 60.0
# The resource that Ray gives the machine of the head.
_HEAD = "node:__internal_head__"


class RayFleet:
    """The fleet of the file `file`, which has a section [ray]. Raises as `settings.read` does."""

    def __init__(self, file: Path) -> None:
        self._file = file.resolve()
        self._fleet = fleet_settings.read(self._file, "{node}")
        if not isinstance(self._fleet.source, RaySettings):
            raise ShapeshiftError(f"{file}: this command needs a section [ray]")
        self.settings = self._fleet.source
        self._home = self._file.parent / self.settings.folder
        self._cluster = Cluster(self._home, self.settings.address)
        self._ray: Any = None

    @property
    def home(self) -> Path:
        """The folder of this machine for the files of its nodes and of the sidecar."""
        return self._home

    @property
    def names(self) -> list[str]:
        """The nodes of the file."""
        return plans.node_names(self.settings.nodes)

    def connect(self) -> None:
        """Connect to the cluster of a fleet that is up. Raises NotFoundError if there is none."""
        if not self._cluster.is_running:
            raise NotFoundError(f"no fleet of {self._file} runs here; start it with `shapeshift fleet up`")
        self._ray = self._cluster.connect(self._namespace)

    def up(self, plan_period_s: float | None = None) -> None:
        """Start a cluster if none is given, and every node and actor that does not run. Returns before they are ready.

        Those that run get their certificates, which are made anew in the last third of their time.

        plan_period_s: the sidecar's; None for no sidecar. Writes the nodes file, with the certificate `operator`, for
        commands on this machine.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        self._ray = self._cluster.connect(self._namespace, self.settings.cpus * self.settings.nodes + 1)
        plan, before = self.plan(), self._hosts()
        self.write_nodes_file(plan)
        if before:
            self._start_again([one.command for one in plan.nodes if one.node.name not in before])
        actors = {one.node.name: ray_actors.node_actor(self._ray, one, plan) for one in plan.nodes}
        certificates = {} if plan.given_tls else plans.made_files(self._home, plans.SIDECAR)
        self._end_other_membership(plan)
        # No other lost machine ends it, and without its head there is no cluster.
        at_head = {"num_cpus": 0, "resources": {_HEAD: 0.001}}
        actor = self._ray.remote(FleetActor).options(**at_head, **ray_actors.lasting(FLEET_ACTOR))
        fleet_actor = actor.remote(plan, actors, certificates, plan_period_s)
        for one in plan.nodes:
            actors[one.node.name].write_files.remote(one.files)
        fleet_actor.write_files.remote(certificates)

    def plan(self) -> FleetPlan:
        """The nodes that the file asks for, on their machines; raises as `make_plan`.

        Under a new head they stay on the machines on which they run.
        """
        room = ray_actors.rooms(self._ray, self.settings)
        placed = self._hosts() or ray_actors.kept_nodes(self._ray, self._home, self.settings)
        return plans.make_plan(self._fleet, self._file.parent, room, placed)

    def write_nodes_file(self, plan: FleetPlan) -> None:
        """Write the fleet file for commands on this machine, and beside it what they show themselves with."""
        file = self._home / NODES_FILE
        write_private(file.parent, {} if plan.given_tls else plans.made_files(self._home, OPERATOR))
        keys = {one.node.name: one.node.key_file for one in plan.nodes if one.node.key_file is not None}
        files.replace_text(file, plan.fleet_file(list(plan.hosts), OPERATOR, keys))

    def statuses(self, names: Iterable[str] = ()) -> dict[str, NodeStatus]:
        """The state of the nodes, all without `names`; of one whose supervisor does not answer, none."""
        answers = {}
        for name in names or self.names:
            with contextlib.suppress(NotFoundError):
                answers[name] = self._actor(name).status.remote()
        if answers:
            self._ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ANSWER_S)
        statuses = {}
        for name, answer in answers.items():
            with contextlib.suppress(self._ray.exceptions.RayError):
                statuses[name] = self._ray.get(answer, timeout=0)
        return statuses

    def wait(self, names: Iterable[str], state: str, timeout_s: float, say: Say) -> None:
        """Wait until each of the nodes is in `state`, and say which one is. Raises TimedOutError naming the others.

        A node that is drained is not waited for to be ready.
        """
        deadline, left = time.monotonic() + timeout_s, list(names)
        while left:
            statuses = self.statuses(left)
            for name, status in statuses.items():
                is_drained = status.is_drained and state == READY
                if status.state == state or is_drained:
                    say(f"{name}: {'is drained' if is_drained else state}\n")
                    left.remove(name)
            if left and time.monotonic() > deadline:
                problems = [
                    f"{name} ({statuses[name].problem if name in statuses else 'no supervisor'})" for name in left
                ]
                raise TimedOutError(f"not {state} after {timeout_s:g} s: {', '.join(problems)}")
            time.sleep(_POLL_S if left else 0.0)

    def drain(self, name: str, timeout_s: float, say: Say) -> None:
        """Take the node out of the fleet, end its requests and stop it. Raises NotFoundError for an unknown name."""
        self._call(self._actor(self._require(name)).drain)
        self.wait([name], STOPPED, timeout_s, say)

    def command_of(self, name: str) -> NodeCommand:
        """How the file asks for the node to be served now. Raises NotFoundError for an unknown name."""
        self._require(name)
        return next(one.command for one in self.plan().nodes if one.node.name == name)

    def actor_pid(self, name: str) -> int:
        """The process of an actor: a node's name, or FLEET_ACTOR."""
        return int(self._call(self._actor(name).pid))

    def kill_head(self) -> None:
        """Kill the cluster that was started here as a crash would, for drills: nodes go on without supervisors."""
        self._ray.shutdown()
        self._cluster.kill()

    def present_command(self, name: str) -> NodeCommand:
        """How the node is served now. Raises NotFoundError for an unknown name."""
        command: NodeCommand = self._call(self._actor(self._require(name)).command)
        return command

    def page(self, name: str) -> Samples:
        """The metrics of the node, read with the certificate `operator`. Raises ShapeshiftError."""
        members = fleet_settings.read(self._home / NODES_FILE, OPERATOR)
        node = next(one for one in members.nodes if one.name == self._require(name))
        return metrics.scrape(node.metrics, tls=members.tls)

    def start(self, command: NodeCommand, timeout_s: float, say: Say) -> None:
        """Start a node that was drained, with its certificate of today, and wait until it is ready."""
        actor = self._actor(command.name)
        files = next((one.files for one in self.plan().nodes if one.node.name == command.name), {})
        self._call(actor.write_files, files)
        self._call(actor.start, command)
        self.wait([command.name], READY, timeout_s, say)

    def down(self, timeout_s: float, say: Say) -> None:
        """Drain all nodes, stop them and every actor, and the cluster if it was started on this machine.

        Without a cluster, stop the nodes that its supervisors have left on this machine.
        """
        if not self._cluster.is_running:
            self._stop_left(timeout_s, say)
            return
        self.connect()
        names = self.names
        statuses = self.statuses()
        try:
            for name in statuses:
                self._call(self._actor(name).drain)
            self.wait(statuses, STOPPED, timeout_s, say)
        finally:
            with contextlib.suppress(ShapeshiftError):
                self._ray.kill(self._actor(FLEET_ACTOR))
            for name in names:
                with contextlib.suppress(ShapeshiftError):
                    if name in statuses:
                        self._call(self._actor(name).forget)
                    self._ray.kill(self._actor(name))
            self._ray.shutdown()
            self._cluster.stop()

    def _require(self, name: str) -> str:
        if name not in self.names:
            near = did_you_mean(name, self.names) or ";"
            raise NotFoundError(f"{self._file} has no node {name}{near} it has {', '.join(self.names)}")
        return name

    def _start_again(self, commands: Iterable[NodeCommand]) -> None:
        """Start the nodes that were drained before the file stated fewer; those that never were are left to `up`."""
        for command in commands:
            with contextlib.suppress(NotFoundError):
                self._call(self._actor(command.name).start, command)

    def _stop_left(self, timeout_s: float, say: Say) -> None:
        build = self._file.parent / self.settings.build
        left = []
        for name in self.names:
            file = plans.fleet_file_of(self._home, name)
            record = node_process.read_record(name, file)
            left.append(NodeProcess(record.command if record else NodeCommand(name, file, build)))
        deadline = time.monotonic() + timeout_s
        for one in left:
            one.terminate()
        for one in left:
            while one.identity is not None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            one.kill()
            node_process.forget_record(one.command.file)
            say(f"{one.command.name}: {STOPPED}\n")

    @property
    def _namespace(self) -> str:
        return f"shapeshift-{self._fleet.name}"

    def _end_other_membership(self, plan: FleetPlan) -> None:
        """End the actor that passes membership on if it knows other nodes than `plan` has: it keeps nothing."""
        with contextlib.suppress(NotFoundError):
            actor = self._actor(FLEET_ACTOR)
            if self._call(actor.addresses) == plan.addresses:
                return
            self._ray.kill(actor)
            deadline = time.monotonic() + _ANSWER_S
            while time.monotonic() < deadline:
                self._actor(FLEET_ACTOR)
                time.sleep(_POLL_S)

    def _hosts(self) -> dict[str, str]:
        """By node that there is, the address of its machine; empty if this is not connected, or nothing runs."""
        if self._ray is None:
            return {}
        with contextlib.suppress(NotFoundError):
            hosts: dict[str, str] = self._call(self._actor(FLEET_ACTOR).hosts)
            return hosts
        return {}

    def _actor(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:
            raise NotFoundError(f"the fleet has no {name}; run `shapeshift fleet up` again") from None

    def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return self._ray.get(method.remote(*arguments), timeout=_ANSWER_S)
        except self._ray.exceptions.GetTimeoutError:
            raise TimedOutError(f"a supervisor did not answer within {_ANSWER_S:g} s") from None
        except self._ray.exceptions.RayTaskError as error:
            raise ShapeshiftError(str(error.cause)) from error
        except self._ray.exceptions.RayError as error:
            raise ShapeshiftError(f"a supervisor does not answer: {error}") from error
