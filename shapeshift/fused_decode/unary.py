"""The front of a model that forwards plain inference requests to the model that generates.

That model is decoupled. It is called over gRPC, as a client calls it: a decoupled BLS call corrupts the heap of the
calling process (Triton 24.10), and cannot be cancelled.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.errors import (
    CancelledRequestError,
    InvalidInputError,
    ModelDiedError,
    OverloadedError,
    ShapeshiftError,
)
from shapeshift.fused_decode.settings import ForwardSettings, GeneratedForwardSettings
from shapeshift.serving import description
from shapeshift.serving.bounds import unloading
from shapeshift.serving.error_codes import is_forwarded
from shapeshift.serving.front import Client, Front, RequestLine
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Gauge, Metric, RequestMetrics
from shapeshift.serving.model_args import DESCRIPTION, ModelArgs
from shapeshift.serving.parameters import FROM_NODE, RequestParameters, is_tritons
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, ResponseSender
from shapeshift.triton.async_client import AsyncClient, ClientThread, ModelCall, Tensors
from shapeshift.triton.endpoint import own_endpoint

_STOP_ID, _STREAM = "stop_id", "stream"
# Period and time limit of the probe of the other model while requests are in flight. Half a minute without an answer is
# what the sidecar, too, takes for a hung process.
_PROBE_TIMEOUT_S = 5.0
FAILED_PROBES = 6
_TICK_S = 0.5


@dataclass(eq=False)
class Call:
    """One request in flight: what its client sent. name: its id, empty if it has none.

    has_begun: whether cancelling reaches the task; error: what its client gets where the task is cancelled or fails.
    """

    client: Client
    name: str
    inputs: dict[str, Any]
    outputs: list[str]
    parameters: dict[str, Any]
    arrived: float = field(default_factory=time.monotonic)
    task: Future[None] | None = None
    has_begun: bool = False
    error: Exception | None = None
    answer: Tensors = field(default_factory=dict)


class UnaryFront(Front[Call]):
    """Forwards each request with stream=false, for which the other model sends exactly one response.

    A request ends after `forward_timeout_s`, and at once when the other model's process has died: this server (24.10)
    never answers what a dead process held.
    """

    # calls: in flight.
    # The other model finds the node that is best for a request.
    any_node = False
    probe_period_s = 1.0

    def __init__(self, pb_utils: PbUtils, args: ModelArgs, client: AsyncClient | None = None) -> None:
        super().__init__(pb_utils, args)
        settings.refuse_unknown(args.parameters, settings.names(ForwardSettings, GeneratedForwardSettings))
        self._settings = settings.read(ForwardSettings, args.parameters)
        self.calls: set[Call] = set()
        self._lock = threading.Lock()
        endpoint = own_endpoint(self._settings.grpc_url)
        self._client = client or AsyncClient(endpoint.address, endpoint.tls)
        self.thread = ClientThread(self._client.close)
        self._forwarding = StepCounter("grpc-client", lambda: bool(self.calls))
        self.begin(RequestMetrics("prompts", 1, 0))
        self._probing = self.thread.start(self._probe())
        self._ticking = self.thread.start(self._tick())

    def handle(self, request: InferenceRequest, sender: ResponseSender) -> None:
        # The other model describes itself, see `respond`.
        self.serve(request, sender)

    def read(self, request: InferenceRequest) -> RequestParameters:
        # The other model checks the parameters.
        return RequestParameters(forwarded=is_forwarded(request))

    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> Call:
        tensors = {name: self.pb_utils.get_input_tensor_by_name(request, name) for name in self.args.inputs}
        # Copied: Triton frees its buffers when `execute` returns.
        inputs = {name: np.array(tensor.as_numpy()) for name, tensor in tensors.items() if tensor is not None}
        if _STREAM in inputs and inputs[_STREAM].any():
            allowed = f"false: this model sends one response; use {self._settings.forward_to} for a stream"
            raise InvalidInputError(_STREAM, True, allowed)
        sent: dict[str, Any] = json.loads(request.parameters() or "{}")
        passed_on = {name: value for name, value in sent.items() if not is_tritons(name)}
        # The other model gets inputs, so that it must be asked for DESCRIPTION by name.
        outputs = [DESCRIPTION.name] if description.is_wanted(request) else list(request.requested_output_names())
        return Call(client, request.request_id(), inputs, outputs, passed_on)

    def start(self, job: Call) -> None:
        with self._lock:
            self.calls.add(job)
            job.task = self.thread.start(self._forward(job))

    def cancel(self, job: Call) -> None:
        self._end(job, CancelledRequestError("the client cancelled the request"))

    def respond(self, job: Call) -> InferenceResponse:
        if DESCRIPTION.name in job.answer:
            described = description.forwarded(job.answer[DESCRIPTION.name][0], self.args.name)
            job.answer[DESCRIPTION.name] = np.array([described], dtype=object)
        return self.response(job.answer)

    def facts(self, job: Call) -> RequestLine:
        named = {name: job.parameters.get(name) for name in ("slo_class", "lora_name")}
        return {"id": job.name or job.parameters.get("id"), **named, "forward_to": self._settings.forward_to}

    def load(self) -> float:
        return len(self.calls)

    def metrics(self) -> Sequence[Metric]:
        return [Gauge("requests_running", "Requests in flight", lambda: len(self.calls))]

    def steps(self) -> Sequence[StepCounter]:
        return [self._forwarding]

    def stop(self, timeout_s: float = 5.0) -> None:
        """Let the other model answer the requests in flight within the time, fail the others, then stop."""
        end = time.monotonic() + timeout_s
        while self.calls and time.monotonic() < end:
            time.sleep(0.01)
        self._probing.cancel()
        self._ticking.cancel()
        for call in list(self.calls):
            self._end(call, unloading())
        self.thread.close()

    async def _forward(self, call: Call) -> None:
        with self._lock:
            call.has_begun = True
        try:
            if call.error is not None:
                raise call.error
            call.answer = await self._ask(call)
        except asyncio.CancelledError:
            call.error = call.error or unloading()
        except ModelDiedError:
            call.error = self._dead()
        except Exception as error:  # noqa: BLE001  whatever happens, the client is answered
            call.error = error.with_traceback(None)
        with self._lock:
            self.calls.remove(call)
        self.done(call)

    async def _ask(self, call: Call) -> Tensors:
        # A request to stop has no other input. It finds the request of that id on whichever node that runs.
        inputs = call.inputs if _STOP_ID in call.inputs else {**call.inputs, _STREAM: np.array([False])}
        timeout_s = self._settings.forward_timeout_s
        target = self._settings.forward_to
        trace = call.client.trace.header if call.client.trace is not None else ""
        return await self._client.first(
            ModelCall(target, inputs, timeout_s, call.outputs, call.parameters, call.name, trace=trace)
        )

    def _end(self, call: Call, failure: ShapeshiftError) -> None:
        """End the call here and, through gRPC, in the other model; its client gets `failure`."""
        with self._lock:
            call.error = failure
            # A task that is cancelled before its first step would never run, nor answer.
            if call.has_begun and call.task is not None:
                call.task.cancel()

    async def _tick(self) -> None:
        """Count the steps of the event loop, which carries all requests in flight."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._forwarding.step()

    async def _probe(self) -> None:
        """Fail the requests in flight when the other model's process has died, or no longer answers."""
        failed = 0
        while True:
            await asyncio.sleep(self.probe_period_s)
            in_flight = list(self.calls)
            try:
                died = await self._died() if in_flight else None
            except Exception as error:  # noqa: BLE001  without the probe requests would wait for a dead process
                self.log.error(f"a probe of {self._settings.forward_to} failed: {type(error).__name__}: {error}")
                continue
            failed = failed + 1 if died is not None else 0
            if died is not None and (isinstance(died, ModelDiedError) or failed >= FAILED_PROBES):
                self.log.error(f"{self._settings.forward_to} does not answer: {len(in_flight)} requests fail ({died})")
                for call in in_flight:
                    self._end(call, self._dead())

    def _dead(self) -> OverloadedError:
        return OverloadedError(f"model {self._settings.forward_to} has died; retry later")

    async def _died(self) -> ShapeshiftError | None:
        """The error that shows that the other model is dead or stuck, None where it answers."""
        nobody = {_STOP_ID: np.array([uuid.uuid4().hex.encode()], dtype=object)}
        # As if another node had asked: it is this node's model that must answer.
        probing = {FROM_NODE: self.args.name}
        call = ModelCall(self._settings.forward_to, nobody, _PROBE_TIMEOUT_S, parameters=probing)
        try:
            await self._client.first(call)
        except (ModelDiedError, OverloadedError) as error:
            return error
        except ShapeshiftError:
            # Any other error is an answer: there is no request of that id.
            return None
        return None
