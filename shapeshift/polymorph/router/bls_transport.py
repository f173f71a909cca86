"""Calls to the workers of one's own server: each holds a thread until the worker answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from shapeshift.engines.interfaces import Ids
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import ModelError
from shapeshift.polymorph.router.membership import MAX_IN_FLIGHT, PACE
from shapeshift.polymorph.router.transport import (
    Exchange,
    Outputs,
    Transport,
    WorkerInfo,
    meaning,
    read_answer,
    request_of,
)
from shapeshift.polymorph.worker import STATE
from shapeshift.serving import bls
from shapeshift.serving.call_pool import CallPool
from shapeshift.serving.model_args import Log
from shapeshift.serving.pb_utils import PbUtils

# A call that leaves between the end of `initialize` and the moment at which the server notes it ends the server
# (24.10). Nothing tells a process when that is: a request proves that it is over, and so does a long time.
_SETTLED_S = 3.0


class WorkerClient:
    """Calls workers by their model names, from any thread. A call blocks until the worker answers."""

    def __init__(self, pb_utils: PbUtils, outputs: Sequence[str]) -> None:
        self._pb_utils = pb_utils
        self._outputs = [*outputs, STATE]

    def call(self, worker: str, texts: Sequence[Ids]) -> tuple[Outputs, WorkerInfo]:
        """The outputs for `texts`, each [len(texts), ...], and the worker's report.

        Raises the errors of `Exchange.ended`, but for CallTimeoutError.
        """
        try:
            answer = bls.call(self._pb_utils, worker, request_of(texts), self._outputs)
        except ModelError as error:
            raise meaning(error) from None
        return read_answer(worker, answer, len(texts))


class BlsTransport:
    """Calls `workers` through a call pool. A late call is abandoned, and its answer counts if it comes after all.

    call: as `WorkerClient.call`. Offers the workers once a request has come, at the latest after `settled_s`.
    max_abandoned: a worker with so many abandoned calls, each of which holds a thread, gets no further calls;
    standstill_s: see `CallPool`.
    """

    def __init__(
        self,
        call: Callable[[str, Sequence[Ids]], tuple[Outputs, WorkerInfo]],
        workers: Sequence[str],
        settled_s: float = _SETTLED_S,
        max_abandoned: int = 200,
        standstill_s: float = PACE.least_limit_s,
    ) -> None:
        self._call = call
        self.names = list(workers)
        self._settled_at = time.monotonic() + settled_s
        threads = MAX_IN_FLIGHT * len(workers)
        self._max_abandoned = max_abandoned
        self.pool = CallPool("worker-call", threads, standstill_s)

    @property
    def timeouts(self) -> int:
        return self.pool.timeouts

    def workers(self) -> Sequence[str]:
        return self.names if time.monotonic() >= self._settled_at else []

    def serve(self) -> None:
        self._settled_at = 0.0

    def start(self, exchange: Exchange) -> None:
        self.pool.submit(exchange.worker, partial(self._run, exchange), exchange.ended, exchange.deadline)

    def is_exhausted(self, worker: str) -> bool:
        return self.pool.abandoned(worker) >= self._max_abandoned

    def close(self, timeout_s: float) -> None:
        self.pool.close(timeout_s)

    def _run(self, exchange: Exchange) -> WorkerInfo | None:
        texts = exchange.begin()
        if texts is None:
            return None
        before = time.perf_counter()
        outputs, info = self._call(exchange.worker, texts)
        exchange.answered(outputs, (time.perf_counter() - before) * 1e3)
        return info


def open_transport(pb_utils: PbUtils, front: str, workers: Sequence[str], manifest: Manifest, log: Log) -> Transport:
    """The transport of a front with these workers in its server. manifest: of the engines."""
    return BlsTransport(WorkerClient(pb_utils, [output.name for output in manifest.outputs]).call, workers)
