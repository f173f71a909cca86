"""The nodes of a fleet on this machine: one server each, with the same emulated fronts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.common.output import BUILD, FOLDER, empty
from bench.polymorph.fleet import emulated_front
from shapeshift.errors import ShapeshiftError
from shapeshift.files import replace_text
from shapeshift.fleet import certificates, settings
from shapeshift.fleet.node import Node
from shapeshift.serving.front import FLEET_FILE_VARIABLE, NODE_VARIABLE
from shapeshift.triton.embedded.free_ports import on_free_ports
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.endpoint import Endpoint, Tls
from shapeshift.triton.metrics import scrape
from shapeshift.triton.settings import ServerSettings

WORK_FOLDER = FOLDER / "fleet"
FILE = WORK_FOLDER / "fleet.toml"
# An engine call of some microseconds, shared by texts that wait, as in `encode`.
_SLOWER = 1e-4
NO_LATENCY = {"bins": "64,512", "dynamic": "true", "packing": "true"}
_READY_S = 300.0
_TLS = WORK_FOLDER.resolve() / "tls"


class Nodes:
    """Running servers by the name of their node. A front is in the fleet under the addresses that `state` writes.

    tls: of who asks them, None for plain text.
    """

    def __init__(self, servers: Mapping[str, TritonServer], tls: Tls | None = None) -> None:
        self.servers = servers
        self.tls = tls

    def state(self, addresses: Mapping[str, str]) -> None:
        """Let the fleet have these nodes, at these addresses of gRPC."""
        nodes = [Node(name, Endpoint(address), self.servers[name].metrics_url) for name, address in addresses.items()]
        shown = None if self.tls is None else _tls("{node}")
        replace_text(FILE, settings.text("bench", shown, nodes), durable=False)

    def total(self, node: str, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        chosen = set(labels.items())
        samples = scrape(self.servers[node].metrics_url, timeout_s=10.0).items()
        return sum(value for (series, of_series), value in samples if series == name and chosen <= of_series)

    def wait_joined(self, node: str, front: str, workers: int) -> None:
        """Wait until the front of a node sends texts to so many workers."""
        end = time.monotonic() + _READY_S
        while self.total(node, "shapeshift_workers_joined", model=front) != workers:
            if time.monotonic() > end:
                raise ShapeshiftError(f"node {node}, front {front}: it has not {workers} workers after {_READY_S:g} s")
            time.sleep(0.2)


def build_fronts(fronts: Sequence[str], **parameters: object) -> None:
    """Build these fronts anew, with workers that hold all engines; parameters: of each."""
    empty(WORK_FOLDER)
    settings = {"placement": "resident", "workers": 1, "min_workers": 1, **NO_LATENCY, **parameters}
    for front in fronts:
        emulated_front(WORK_FOLDER, front, [32], _SLOWER, **settings)


@contextmanager
def running_nodes(models: Mapping[str, Sequence[str]], secured: bool = False) -> Iterator[Nodes]:
    """Servers for these nodes, each with a copy of what was built and these models loaded; all in one fleet.

    secured: gRPC with mutual TLS, between nodes and with who asks them.
    """
    with ExitStack() as stack:
        servers = {}
        for node, loaded in models.items():
            folder = WORK_FOLDER / node
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(WORK_FOLDER / "build", folder)
            settings = ServerSettings(
                repositories=(folder / "repository",),
                models=tuple(loaded),
                backend_directories=(Path("backends"),),
                triton=BUILD / "triton",
                run_directory=folder / "run",
                variables={FLEET_FILE_VARIABLE: str(FILE.resolve()), NODE_VARIABLE: node},
                complete_configs=False,
                tls=certificates.ensure(_TLS, node) if secured else None,
            )
            servers[node] = TritonServer(on_free_ports(settings))
        nodes = Nodes(servers, certificates.ensure(_TLS, "client") if secured else None)
        nodes.state({name: server.grpc_url for name, server in servers.items()})
        for server in servers.values():
            stack.enter_context(server)
        for server in servers.values():
            server.wait_ready(_READY_S)
        yield nodes


def _tls(node: str) -> Tls:
    """The files of a node, as `certificates` names them."""
    return Tls(_TLS / "ca.pem", _TLS / f"{node}.pem", _TLS / f"{node}.key")
