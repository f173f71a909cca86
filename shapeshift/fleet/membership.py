"""Which nodes the fleet has: those of a file that is read again when it changes, or those that DNS has.

    [dns]
    service = "shapeshift.default.svc.cluster.local"
    names = "hostname"

names the addresses behind one name, such as those of a headless Kubernetes Service. Every node has the same ports. The
name is resolved again every few seconds.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.fleet.node import Members, Membership, Node
from shapeshift.fleet.settings import ADDRESS, DnsSettings, RaySettings
from shapeshift.loops import Loop
from shapeshift.registry import FolderWatch
from shapeshift.triton.endpoint import Endpoint, Tls, bracketed

# In the folder of a fleet on Ray: a fleet file with [[nodes]], which `fleet up` writes.
NODES_FILE = "nodes.toml"
# Seconds between two look-ups.
_PERIOD_S = 5.0
# An answer older than so many periods is reported: the resolver does not come back.
_LATE_PERIODS = 4


def addresses_of(host: str) -> list[str]:
    """The IP addresses of `host`. May block for seconds; raises OSError."""
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})


def hostname_of(address: str) -> str:
    """The name of an IP address. May block for seconds; raises OSError."""
    return socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]


class DnsMembership:
    """The nodes whose addresses DNS has, looked up by a thread of its own.

    tls: with which nodes are reached; their pages of metrics too, then. folder: of the fleet file.
    An empty or failed answer keeps the last nodes. A node whose hostname is not found is left out until it is. Both are
    reported as problems.
    """

    def __init__(
        self,
        options: DnsSettings,
        tls: Tls | None,
        folder: Path,
        addresses: Callable[[str], list[str]] = addresses_of,
        hostname: Callable[[str], str] = hostname_of,
        clock: Callable[[], float] = time.monotonic,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._settings = options
        self._period_s = period_s
        self._tls = tls
        self._folder = folder
        self._look_up_addresses = addresses
        self._look_up_hostname = hostname
        self._clock = clock
        self._members = Members(problem=f"{options.service} is being looked up")
        self._hostnames: dict[str, str] = {}
        self._answered = clock()
        self._loop = Loop("dns", self._step, self._report)
        self._loop.start()

    def members(self) -> Members:
        """The nodes of the last answer; never blocks."""
        members, late_s = self._members, self._clock() - self._answered
        if late_s > _LATE_PERIODS * self._period_s and not members.problem:
            return Members(members.nodes, f"{self._settings.service}: no answer of DNS for {late_s:.0f} s")
        return members

    def close(self) -> None:
        """End the thread, which may be waiting for DNS: it is not waited for."""
        self._loop.stop(timeout_s=0.0)

    def look_up(self) -> Members:
        """The nodes that DNS has now, or the last ones with the problem. Blocks; only the thread calls it."""
        service = self._settings.service
        try:
            addresses = self._look_up_addresses(service)
        except OSError as error:
            return Members(self._members.nodes, f"{service} could not be looked up: {error}")
        if not addresses:
            return Members(self._members.nodes, f"{service} has no addresses")
        nodes: dict[str, Node] = {}
        problems = []
        for address in addresses:
            try:
                node = self._node(address)
            except (OSError, InvalidInputError) as error:
                problems.append(f"{address} is left out: {error}")
                continue
            if nodes.setdefault(node.name, node) is not node:
                problems.append(f"{address} is left out: another node is named {node.name}")
        self._hostnames = {address: name for address, name in self._hostnames.items() if address in addresses}
        return Members([nodes[name] for name in sorted(nodes)], "; ".join(problems))

    def _node(self, address: str) -> Node:
        options = self._settings
        name, host = (node_name(address), bracketed(address)) if options.names == ADDRESS else self._hostname(address)
        metrics = f"{'https' if self._tls else 'http'}://{host}:{options.metrics_port}/metrics"
        key_file = self._folder / options.key_file.replace("{node}", name) if options.key_file else None
        return Node(name, Endpoint(f"{host}:{options.grpc_port}", self._tls), metrics, key_file)

    def _hostname(self, address: str) -> tuple[str, str]:
        """The first label of the address' hostname, and that name; the last one where it is not found this time."""
        try:
            self._hostnames[address] = self._look_up_hostname(address)
        except OSError:
            if address not in self._hostnames:
                raise
        host = self._hostnames[address]
        return host.partition(".")[0].lower(), host

    def _step(self) -> float:
        self._members = self.look_up()
        self._answered = self._clock()
        return self._period_s

    def _report(self, problem: str) -> None:
        self._members = Members(self._members.nodes, problem)


def node_name(address: str) -> str:
    """The name of a node without another one: its IP address with dashes, which is a DNS label."""
    return re.sub(r"[.:]", "-", ipaddress.ip_address(address).exploded)


class FileMembership:
    """The nodes of the fleet file `path`, as the node `node` reads it. None, with a problem, until one is valid.

    A file that is invalid later changes nothing: the last nodes stay, and the problem is reported.
    """

    def __init__(self, path: Path, node: str = "") -> None:
        self._path = path
        self._node = node
        self._watch = FolderWatch(path)
        self._members = Members()

    def members(self) -> Members:
        """The nodes of the file's last valid content."""
        if self._watch.has_changed():
            try:
                self._members = Members(settings.read(self._path, self._node).nodes)
            except ShapeshiftError as error:
                self._members = Members(self._members.nodes, str(error))
        return self._members

    def close(self) -> None:
        """Nothing is held."""


def open_membership(path: Path, node: str = "") -> Membership:
    """The membership of the fleet file `path`, as the node `node` (empty: none) reads it; to be closed.

    Raises as `settings.read` does.
    """
    fleet = settings.read(path, node)
    if isinstance(fleet.source, DnsSettings):
        return DnsMembership(fleet.source, fleet.tls, path.parent)
    if isinstance(fleet.source, RaySettings):
        return FileMembership(path.parent / fleet.source.folder / NODES_FILE, node)
    return FileMembership(path, node)
