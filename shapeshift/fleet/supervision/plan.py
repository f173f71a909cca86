"""What `shapeshift fleet up` asks Ray for: nodes, their addresses, and the files of each."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shapeshift.errors import UnsupportedError
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.node import Node
from shapeshift.fleet.settings import METRICS_OFFSET, FleetSettings, RaySettings
from shapeshift.fleet.supervision.node_process import NodeCommand
from shapeshift.triton.endpoint import Endpoint, Tls, bracketed

# The folder of the sidecar among those of the nodes, and its name in certificates.
SIDECAR = "sidecar"
_FLEET_FILE = "fleet.toml"
# As `certificates` names it.
_CA_FILE = "ca.pem"


@dataclass(frozen=True)
class NodePlan:
    """One node. host: the address of the machine that Ray places it on; files: for TLS, their contents by name."""

    node: Node
    command: NodeCommand
    host: str
    files: dict[str, bytes]


@dataclass(frozen=True)
class FleetPlan:
    """All nodes of a fleet, and the settings that they come from. folder: that of the fleet file."""

    name: str
    folder: Path
    settings: RaySettings
    nodes: tuple[NodePlan, ...]
    given_tls: Tls | None

    @property
    def home(self) -> Path:
        """The folder of every machine for the files of its nodes."""
        return self.folder / self.settings.folder

    @property
    def hosts(self) -> dict[str, str]:
        """By node, the address of its machine."""
        return {one.node.name: one.host for one in self.nodes}

    def with_node(self, name: str, host: str) -> FleetPlan:
        """The plan with one node more, on the machine `host`. Raises as `made_files` does."""
        settings, number = self.settings, int(name.rpartition("-")[2])
        grpc, metrics = (
            f"{bracketed(host)}:{settings.grpc_port + number}",
            f"https://{bracketed(host)}:{settings.grpc_port + METRICS_OFFSET + number}/metrics",
        )
        build = self.folder / settings.build
        command = NodeCommand(name, fleet_file_of(self.home, name), build, tuple(shlex.split(settings.serve)))
        contents = {} if self.given_tls is not None else made_files(self.home, name, [host])
        node = Node(name, Endpoint(grpc, tls_of(self.given_tls, name)), metrics, command.run_directory / "key")
        return replace(self, nodes=(*self.nodes, NodePlan(node, command, host, contents)))

    @property
    def addresses(self) -> dict[str, str]:
        """By node, the address of its gRPC."""
        return {one.node.name: one.node.grpc.address for one in self.nodes}

    def fleet_file(self, members: Sequence[str], reader: str, keys: Mapping[str, Path] | None = None) -> str:
        """The fleet file with the nodes `members`, as `reader`, a node or the sidecar, reads it.

        keys: by node, the file of its control key.
        """
        nodes = [one.node for one in self.nodes if one.node.name in members]
        chosen = [Node(node.name, node.grpc, node.metrics, (keys or {}).get(node.name)) for node in nodes]
        return fleet_settings.text(self.name, tls_of(self.given_tls, reader), chosen)


def fleet_file_of(home: Path, name: str) -> Path:
    """The fleet file that the processes of the node read. home: as `FleetPlan.home`."""
    return home / name / _FLEET_FILE


def node_names(count: int) -> list[str]:
    """node-0, node-1, ..."""
    return [f"node-{number}" for number in range(count)]


def rooms(machines: Iterable[tuple[str, Mapping[str, float]]], settings: RaySettings) -> dict[str, int]:
    """By address, how many nodes a machine has room for, if any: a head is often started without processors.

    machines: address and Ray's resources of each.
    """
    reserved = {"CPU": settings.cpus, "GPU": settings.gpus}
    room: Counter[str] = Counter()
    for host, resources in machines:
        fits = [int(resources.get(name, 0.0) / count) for name, count in reserved.items() if count]
        room[host] += min(fits, default=settings.nodes)
    return {host: count for host, count in sorted(room.items()) if count}


def free_host(room: Mapping[str, int], placed: Collection[str]) -> str | None:
    """The machine with the fewest nodes among those with room for one more; None if there is none.

    placed: the machine of each node.
    """
    held = Counter(placed)
    free = [host for host in room if held[host] < room[host]]
    return min(free, key=lambda host: (held[host], host), default=None)


def make_plan(
    fleet: FleetSettings, folder: Path, room: Mapping[str, int], placed: Mapping[str, str] | None = None
) -> FleetPlan:
    """The nodes of `fleet`, on the machines of `room`. folder: that of the fleet file; placed: by node that runs, its
    machine.

    fleet has a section [ray], and is read as the node `{node}`. Certificates are made in `folder` where the fleet file
    names none. Raises UnsupportedError where no machine has room for any node.
    """
    ray = fleet.source
    assert isinstance(ray, RaySettings)
    placed = dict(placed or {})
    plan = FleetPlan(fleet.name, folder, ray, (), fleet.tls)
    names = node_names(ray.nodes)
    for name in names:
        if name not in placed:
            # Nodes beyond the room are placed all the same: Ray starts them once there is some.
            beyond = {host: count + len(names) for host, count in room.items()}
            host = free_host(room, placed.values()) or free_host(beyond, placed.values())
            if host is None:
                reserved = f"cpus = {ray.cpus:g} and gpus = {ray.gpus:g}"
                raise UnsupportedError(f"no machine of the Ray cluster has {reserved}, which each node reserves")
            placed[name] = host
        plan = plan.with_node(name, placed[name])
    return plan


def tls_of(tls: Tls | None, name: str) -> Tls:
    """The files with which `name` shows itself: those of the fleet file, else those beside its own fleet file."""
    if tls is None:
        return Tls(Path(_CA_FILE), Path(f"{name}.pem"), Path(f"{name}.key"))
    return Tls(*(Path(str(file).replace("{node}", name)) for file in (tls.ca, tls.certificate, tls.key)))


def made_files(home: Path, name: str, hosts: Sequence[str] = ()) -> dict[str, bytes]:
    """The contents of the certificate files of `name`, made below `home` where they are missing.

    Raises UnsupportedError where the package that makes them is missing.
    """
    try:
        from shapeshift.fleet import certificates
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed: pip install 'shapeshift[fleet]'") from None
    tls = certificates.ensure(home / "tls", name, hosts)
    return {file.name: file.read_bytes() for file in (tls.ca, tls.certificate, tls.key)}
