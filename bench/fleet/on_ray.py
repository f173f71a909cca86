"""A fleet on Ray with emulated workers: its file, and what its fronts say."""

from __future__ import annotations

from bench.common.output import BUILD
from bench.polymorph.fleet import joined
from shapeshift.fleet.supervision.ray_fleet import RayFleet

_FILE = """
name = "{name}"

[ray]
nodes = {nodes}
cpus = 0.5
grpc_port = {port}
build = "build"
serve = "--models {front} --triton {triton}"
"""


def fleet_file(name: str, front: str, nodes: int, port: int, address: str = "") -> str:
    """The fleet file of `nodes` nodes that serve `front`.

    port: of gRPC, the first of each machine; those of metrics are 1000 above. address: of the head; empty: started.
    """
    triton = (BUILD / "triton").resolve()
    text = _FILE.format(name=name, nodes=nodes, port=port, front=front, triton=triton)
    return text + (f'address = "{address}"\n' if address else "")


def workers_joined(fleet: RayFleet, node: str, front: str) -> float:
    """To how many workers the front of a node sends texts. Raises ShapeshiftError where the node does not answer."""
    return joined(fleet.page(node), front)
