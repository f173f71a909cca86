"""The transport of a front in a fleet: workers of its own server, and those of the same front on the other nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shapeshift.engines.manifest import Manifest
from shapeshift.fleet.grpc_transport import GrpcTransport, RemoteWorkerClient
from shapeshift.fleet.membership import open_membership
from shapeshift.fleet.node_clients import NodeClients
from shapeshift.fleet.polling import NodePoll
from shapeshift.polymorph.router import bls_transport
from shapeshift.polymorph.router.transport import Exchange, Transport
from shapeshift.serving.model_args import Log, fleet_file, own_node
from shapeshift.serving.pb_utils import PbUtils
from shapeshift.triton.async_client import AsyncClient
from shapeshift.triton.names import qualified, split, worker_front

_ANSWER_S = 5.0


async def loaded_models(node: str, client: AsyncClient) -> frozenset[str]:
    """The models that the node has loaded."""
    return frozenset(await client.models(_ANSWER_S))


class FleetTransport:
    """A worker of another node is named `node/model`; a call to it goes over gRPC, any other to `local`.

    poll: asks the other nodes for `loaded_models`. A node that does not answer keeps its last ones until it leaves the
    fleet: calls to it show what is wrong.
    """

    def __init__(
        self,
        local: Transport,
        remote: GrpcTransport,
        poll: NodePoll[frozenset[str]],
        front: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._remote = remote
        self._poll = poll
        self._front = front
        self._clock = clock

    @property
    def timeouts(self) -> int:
        return self._local.timeouts + self._remote.timeouts

    def workers(self) -> Sequence[str]:
        others = [
            qualified(node, model)
            for node, models in self._poll.answers.items()
            for model in sorted(models)
            if worker_front(model) == self._front
        ]
        return [*self._local.workers(), *others]

    def serve(self) -> None:
        self._local.serve()

    def start(self, exchange: Exchange) -> None:
        (self._remote if split(exchange.worker)[0] else self._local).start(exchange)

    def is_exhausted(self, worker: str) -> bool:
        return self._local.is_exhausted(worker)

    def close(self, timeout_s: float) -> None:
        end = self._clock() + timeout_s
        self._poll.close(timeout_s)
        for transport in (self._remote, self._local):
            transport.close(max(end - self._clock(), 0.0))


def open_transport(pb_utils: PbUtils, front: str, workers: Sequence[str], manifest: Manifest, log: Log) -> Transport:
    """The transport of a front whose server is a node of a fleet; see `bls_transport.open_transport`.

    Raises ShapeshiftError for a fleet file that cannot be read.
    """
    local = bls_transport.open_transport(pb_utils, front, workers, manifest, log)
    file, node = fleet_file(), own_node()
    assert file is not None, "a front outside a fleet has another transport"
    clients = NodeClients()
    poll = NodePoll(open_membership(file, node), clients, node, log, loaded_models)
    return FleetTransport(local, GrpcTransport(clients, RemoteWorkerClient(manifest)), poll, front)
