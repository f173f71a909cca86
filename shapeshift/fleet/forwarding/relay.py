"""One request that another node serves: its responses are passed on to its client as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import EngineError, ShapeshiftError, TimedOutError
from shapeshift.serving import error_codes
from shapeshift.serving.bounds import unloading
from shapeshift.serving.front import Front
from shapeshift.serving.pb_utils import (
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
    PbUtils,
    ResponseSender,
    Tensor,
)
from shapeshift.serving.responses import Make
from shapeshift.triton.async_client import AsyncClient, ModelCall, Tensors

# The longest answer; a node that stops answering is noticed long before.
_TIMEOUT_S = 600.0


class HeldRequest:
    """A copy of a request, which a front serves as it serves Triton's; see `pb_utils.InferenceRequest`.

    arrays            the inputs by name
    parameter_values  the parameters
    """

    def __init__(self, pb_utils: PbUtils, request: InferenceRequest, sender: ResponseSender) -> None:
        self._pb_utils = pb_utils
        self._sender = sender
        self._id = request.request_id()
        self._parameters = request.parameters()
        self._outputs = list(request.requested_output_names())
        self._trace = request.trace()
        # Triton frees its buffers when `execute` returns.
        self.arrays: dict[str, NDArray[Any]] = {one.name(): np.array(one.as_numpy()) for one in request.inputs()}
        self.parameter_values: dict[str, Any] = json.loads(self._parameters or "{}")

    def request_id(self) -> str:
        return self._id

    def inputs(self) -> Sequence[Tensor]:
        return [self._pb_utils.Tensor(name, values) for name, values in self.arrays.items()]

    def parameters(self) -> str:
        return self._parameters

    def requested_output_names(self) -> Sequence[str]:
        return self._outputs

    def get_response_sender(self) -> ResponseSender:
        return self._sender

    def trace(self) -> InferenceTrace | None:
        return self._trace


class Relay:
    """A request on another node; a `serving.responses.ResponseStream` towards its client.

    finishing(relay, code): called on the sending thread before the last response, with its outcome.
    refused(relay): called on the event loop where the node has not begun to answer and another one may.
    """

    def __init__(
        self,
        front: Front[Any],
        held: HeldRequest,
        node: str,
        parameters: dict[str, object],
        finishing: Callable[[Relay, str], None],
        refused: Callable[[Relay], None],
    ) -> None:
        self.response_sender: ResponseSender | None = held.get_response_sender()
        self.held = held
        self.node = node
        self.id = held.request_id() or str(held.parameter_values.get("id", ""))
        # Clients choose their ids: two of them on two nodes may have chosen the same.
        self.id_there = uuid.uuid4().hex
        self.is_stop = front.stop_id in held.arrays
        self.trace = front.trace(held)
        self._front = front
        self._parameters = parameters
        self._finishing = finishing
        self._refused = refused
        self._pending: deque[tuple[Make, bool, str]] = deque()
        self._has_begun = self._has_ended = False
        self._lock = threading.Lock()
        self._task: Future[None] | None = None
        self._is_running = False
        self._failure: ShapeshiftError | None = None

    def start(self, start: Callable[..., Future[None]], client: contextlib.AbstractContextManager[AsyncClient]) -> None:
        """Send the request; start: runs a task on the event loop."""
        with self._lock:
            self._task = start(self._run(client))

    def cancel(self, failure: ShapeshiftError) -> None:
        """End the request here and, through gRPC, on its node. failure: its error, or the reason to serve it here."""
        with self._lock:
            self._failure = self._failure or failure
            # A task that is cancelled before its first step would never run, nor answer.
            if self._is_running and self._task is not None:
                self._task.cancel()

    def next_response(self) -> tuple[InferenceResponse, bool] | None:
        if not self._pending:
            return None
        make, last, code = self._pending.popleft()
        if last:
            self._finishing(self, code)
        return make(), last

    def sent(self, last: bool) -> None:
        """The node counts its answers; here is nothing to count."""

    def broken(self) -> None:
        self.cancel(unloading())

    async def _run(self, client: contextlib.AbstractContextManager[AsyncClient]) -> None:
        try:
            with self._lock:
                self._is_running = True
                failure = self._failure
            if failure is not None:
                raise failure
            with client as connected:
                await self._pass_on(connected)
            return
        except asyncio.CancelledError:
            error: Exception = self._failure or unloading()
        except Exception as failed:  # noqa: BLE001  whatever happens, the client is answered
            error = failed.with_traceback(None)
        if not self._has_begun and _may_be_served_elsewhere(error):
            self._refused(self)
        else:
            respond = error_codes.with_code if error_codes.is_forwarded(self.held) else error_codes.error_response
            self._post(partial(respond, self._front.pb_utils, error), True, error_codes.code_name(error))

    async def _pass_on(self, client: AsyncClient) -> None:
        call = ModelCall(
            self._front.args.name,
            self.held.arrays,
            _TIMEOUT_S,
            self.held.requested_output_names(),
            self._parameters,
            self.id_there,
            trace="" if self.trace is None else self.trace.header,
        )
        if not self._front.stream:
            self._post(partial(self._response, await client.infer(call)), True)
            return
        async with contextlib.aclosing(client.responses(call)) as responses:
            # Beyond the last one, to the end of the stream: see `async_client.first_of`.
            async for tensors, last in responses:
                self._has_begun = True
                self._post(partial(self._response, tensors), last)
        if not self._has_ended:
            raise EngineError(f"{self._front.args.name} of node {self.node} ended its responses without a last one")

    def _post(self, make: Make, last: bool, code: str = "OK") -> None:
        # What happens to the stream after its last response is not the client's concern.
        if self._has_ended:
            return
        self._has_ended = last
        self._pending.append((make, last, code))
        self._front.responder.post([self])

    def _response(self, outputs: Tensors) -> InferenceResponse:
        if self._front.id_output in outputs and self.id:
            outputs[self._front.id_output] = np.array([self.id.encode()], dtype=object)
        pb_utils = self._front.pb_utils
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, values) for name, values in outputs.items()])


def _may_be_served_elsewhere(error: Exception) -> bool:
    """Whether it is the node that refuses: it is full, has gone, or does not know a name that others may know.

    A model that died may have died of the request, which is not sent to another one.
    """
    return error_codes.code_name(error) in ("UNAVAILABLE", "NOT_FOUND") and not isinstance(error, TimedOutError)
