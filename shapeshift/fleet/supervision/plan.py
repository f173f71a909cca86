"""What `shapeshift fleet up` asks Ray for: nodes, their addresses, and the files of each."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shapeshift.errors import UnsupportedError
from shapeshift.fleet import fleet_file
from shapeshift.fleet.membership import written
from shapeshift.fleet.membership.written import RaySettings
from shapeshift.fleet.node import Node
from shapeshift.fleet.settings import FleetSettings
from shapeshift.fleet.supervision.node_process import NodeCommand
from shapeshift.triton.endpoint import Endpoint, Tls

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
    """All nodes of a fleet, and the settings that they come from."""

    name: str
    settings: RaySettings
    nodes: tuple[NodePlan, ...]
    given_tls: Tls | None

    def fleet_file(self, members: Sequence[str], reader: str, keys: Mapping[str, Path] | None = None) -> str:
        """The fleet file with the nodes `members`, as `reader`, a node or the sidecar, reads it.

        keys: by node, the file of its control key.
        """
        nodes = [one.node for one in self.nodes if one.node.name in members]
        chosen = [Node(node.name, node.grpc, node.metrics, (keys or {}).get(node.name)) for node in nodes]
        return fleet_file.text(self.name, tls_of(self.given_tls, reader), chosen)


def node_names(count: int) -> list[str]:
    """node-0, node-1, ..."""
    return [f"node-{number}" for number in range(count)]


def able_hosts(resources: Mapping[str, Mapping[str, float]], settings: RaySettings) -> list[str]:
    """The machines that have what one node reserves: a head is often started without processors, and serves no node.

    resources: by address, those of Ray. Raises UnsupportedError if there is none.
    """
    wanted = {"CPU": settings.cpus, "GPU": settings.gpus}
    able = [
        host
        for host, own in sorted(resources.items())
        if all(own.get(name, 0.0) >= count for name, count in wanted.items())
    ]
    if not able:
        raise UnsupportedError(
            f"no machine of the Ray cluster has cpus = {settings.cpus:g} and gpus = {settings.gpus:g}, which each node "
            f"reserves; its machines: {', '.join(sorted(resources)) or 'none'}"
        )
    return able


def make_plan(fleet: FleetSettings, folder: Path, hosts: Sequence[str]) -> FleetPlan:
    """The nodes of `fleet`, one after the other on the machines `hosts`. folder: that of the fleet file.

    fleet is read as the node `{node}`. Certificates are made in `folder` where the fleet file names none. Raises
    InvalidInputError for an invalid section [ray].
    """
    own = written.read(fleet.source.get("ray", {}))
    build, home = folder / own.build, folder / own.folder
    plans = []
    for number, name in enumerate(node_names(own.nodes)):
        host = hosts[number % len(hosts)]
        grpc, metrics = f"{host}:{own.grpc_port + number}", f"https://{host}:{own.metrics_port + number}/metrics"
        key = build / "nodes" / name / "run" / "key"
        command = NodeCommand(name, home / name / _FLEET_FILE, build, tuple(shlex.split(own.serve)))
        contents = {} if fleet.tls is not None else made_files(home, name, [host])
        plans.append(
            NodePlan(Node(name, Endpoint(grpc, tls_of(fleet.tls, name)), metrics, key), command, host, contents)
        )
    return FleetPlan(fleet.name, own, tuple(plans), fleet.tls)


def tls_of(given: Tls | None, name: str) -> Tls:
    """The files with which `name` shows itself: those of the fleet file, else those beside its own fleet file."""
    if given is None:
        return Tls(Path(_CA_FILE), Path(f"{name}.pem"), Path(f"{name}.key"))
    return Tls(*(Path(str(file).replace("{node}", name)) for file in (given.ca, given.certificate, given.key)))


def made_files(home: Path, name: str, hosts: Sequence[str] = ()) -> dict[str, bytes]:
    """The contents of the certificate files of `name`, made below `home` where they are missing.

    Raises UnsupportedError where the package that makes them is missing.
    """
    try:
        from shapeshift.fleet import certificates
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed: pip install 'shapeshift[fleet]'") from None
    made = certificates.ensure(home / "tls", name, hosts)
    return {file.name: file.read_bytes() for file in (made.ca, made.certificate, made.key)}
