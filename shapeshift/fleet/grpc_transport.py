"""Calls to the workers of other nodes: no thread waits for them, and a late one is cancelled on its server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent import futures

from shapeshift.engines.interfaces import Ids
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import ModelError, TimedOutError
from shapeshift.fleet.node_clients import NodeClients
from shapeshift.polymorph.router.transport import (
    Exchange,
    Outputs,
    WorkerInfo,
    meaning,
    of_other_engines,
    read_answer,
    request_of,
)
from shapeshift.polymorph.worker import STATE
from shapeshift.serving.bounds import unloading
from shapeshift.serving.call_pool import CallTimeoutError
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.triton.names import split


class RemoteWorkerClient:
    """Calls workers of other nodes. manifest: of the front's own engines."""

    def __init__(self, manifest: Manifest) -> None:
        self._outputs = [*(output.name for output in manifest.outputs), STATE]
        self._version = manifest.answers_version()

    async def call(
        self, client: AsyncClient, worker: str, texts: Sequence[Ids], deadline: float
    ) -> tuple[Outputs, WorkerInfo]:
        """As `bls_transport.WorkerClient.call`, through the client of the worker's node and on its event loop.

        worker: `node/model`; deadline: monotonic. Raises OtherVersionError for a worker with other engines;
        TimedOutError and ModelError of the server pass.
        """
        call = ModelCall(split(worker)[1], request_of(texts), seconds_until(deadline), self._outputs)
        outputs, info = read_answer(worker, await client.infer(call), len(texts))
        if info.version != self._version:
            raise of_other_engines()
        return outputs, info


class GrpcTransport:
    """Starts calls to workers named `node/model` by `remote`, over `clients`, which it closes."""

    def __init__(self, clients: NodeClients, remote: RemoteWorkerClient) -> None:
        self.timeouts = 0
        self._clients = clients
        self._remote = remote
        self._calls: set[futures.Future[None]] = set()

    def start(self, exchange: Exchange) -> None:
        """See `Transport.start`."""
        future = self._clients.start(self._run(exchange))
        self._calls.add(future)
        future.add_done_callback(self._forget)

    def close(self, timeout_s: float) -> None:
        """See `Transport.close`."""
        futures.wait(list(self._calls), timeout_s)
        self._clients.close()

    def _forget(self, call: futures.Future[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            # The router's own fault: printed like that of a thread.
            threading.excepthook(threading.ExceptHookArgs([type(error), error, error.__traceback__, None]))

    async def _run(self, exchange: Exchange) -> None:
        outcome: WorkerInfo | Exception | None
        try:
            outcome = await self._answer(exchange)
        except TimedOutError:
            self.timeouts += 1
            outcome = CallTimeoutError(f"{exchange.worker}: no answer in time", started=True)
        except ModelError as error:
            outcome = meaning(error)
        except asyncio.CancelledError:
            outcome = unloading()
        except Exception as error:  # noqa: BLE001  whatever it is, the rows of the call need another worker
            outcome = error
        exchange.ended(outcome)

    async def _answer(self, exchange: Exchange) -> WorkerInfo | None:
        texts = exchange.begin()
        if texts is None:
            return None
        node, _ = split(exchange.worker)
        before = time.perf_counter()
        with self._clients.calling(node) as client:
            outputs, info = await self._remote.call(client, exchange.worker, texts, exchange.deadline)
        exchange.answered(outputs, (time.perf_counter() - before) * 1e3)
        return info


def seconds_until(deadline: float) -> float:
    """The time limit of a call that must end at `deadline`, monotonic seconds."""
    return max(deadline - time.monotonic(), 0.0)
