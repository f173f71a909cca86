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
from functools import partial
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
from shapeshift.fused_decode.settings import ForwardSettings
from shapeshift.serving import description
from shapeshift.serving.bounds import Bound, unloading
from shapeshift.serving.cancellations import CancellationWatch
from shapeshift.serving.error_codes import FORWARDED
from shapeshift.serving.liveness import Liveness, StepCounter
from shapeshift.serving.metrics import Gauge, Metric, MetricsFlusher, RequestMetrics
from shapeshift.serving.model_args import DESCRIPTION, ModelArgs, model_log
from shapeshift.serving.parameters import FROM_NODE, is_tritons
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, ResponseSender, Returned
from shapeshift.serving.responses import Responder
from shapeshift.triton.async_client import AsyncClient, ModelCall, Tensors
from shapeshift.triton.client_thread import ClientThread
from shapeshift.triton.settings import own_endpoint

_STOP_ID, _STREAM = "stop_id", "stream"
# Period and time limit of the probe of the other model while requests are in flight. Half a minute without an answer is
# what the sidecar, too, takes for a hung process.
_PROBE_PERIOD_S, _PROBE_TIMEOUT_S = 1.0, 5.0
_FAILED_PROBES = 6
_TICK_S = 0.5


@dataclass(eq=False)
class Call:
    """One request in flight: what its client sent. name: its id, empty if it has none.

    failure: the error that its client gets once the task is cancelled; started: whether cancelling reaches the task.
    """

    sender: ResponseSender
    name: str
    inputs: dict[str, Any]
    outputs: list[str]
    parameters: dict[str, Any]
    arrived: float = field(default_factory=time.monotonic)
    task: Future[None] | None = None
    started: bool = False
    failure: ShapeshiftError | None = None


class UnaryFront:
    """Forwards each request with stream=false, for which the other model sends exactly one response.

    A request ends after `forward_timeout_s`, and at once when the other model's process has died: this server (24.10)
    never answers what a dead process held.
    """

    def __init__(self, pb_utils: PbUtils, args: ModelArgs, client: AsyncClient | None = None) -> None:
        self._pb_utils = pb_utils
        self._name = args.name
        self._log = model_log(pb_utils, args.name)
        settings.refuse_unknown(args.parameters, settings.names(ForwardSettings))
        self._settings = settings.read(ForwardSettings, args.parameters)
        self._input_names = [tensor["name"] for tensor in args.config["input"]]
        self._bound = Bound("forward_requests", self._settings.forward_requests, "requests", "are in flight")
        self._calls: set[Call] = set()
        self._lock = threading.Lock()
        own = own_endpoint(self._settings.grpc_url)
        self._client = client or AsyncClient(own.address, own.tls)
        self._thread = ClientThread(self._client)
        self._watch = CancellationWatch(self._log)
        self._request_metrics = RequestMetrics("prompts", 1, 0)
        self._responder = Responder(pb_utils, self._request_metrics, self._log)
        self._forwarding = StepCounter("grpc-client", lambda: bool(self._calls))
        steps = [*self._responder.steps, self._forwarding]
        exported: list[Metric] = [
            self._request_metrics.latency_ms,
            *self._request_metrics.answered.values(),
            Gauge("requests_running", "Requests in flight", lambda: len(self._calls)),
            Liveness(lambda: steps, self._log).metric,
        ]
        self._flusher = MetricsFlusher(pb_utils, args.name, exported, self._log)
        self._probing = self._thread.start(self._probe())
        self._ticking = self._thread.start(self._tick())

    def execute(self, requests: Sequence[InferenceRequest]) -> Returned:
        """Forward every request; an invalid request, or one too many, gets an error at once."""
        return self._responder.start(requests, self._submit)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the other model answer the requests in flight within the time, fail the others, then stop."""
        self._watch.close()
        end = time.monotonic() + timeout_s
        while self._calls and time.monotonic() < end:
            time.sleep(0.01)
        self._probing.cancel()
        self._ticking.cancel()
        for call in list(self._calls):
            self._cancel(call, unloading())
        self._thread.close()
        self._responder.close()
        self._flusher.close()

    def _submit(self, request: InferenceRequest, sender: ResponseSender) -> None:
        found = {name: self._pb_utils.get_input_tensor_by_name(request, name) for name in self._input_names}
        # Copied: Triton frees its buffers when `execute` returns.
        inputs = {name: np.array(tensor.as_numpy()) for name, tensor in found.items() if tensor is not None}
        if _STREAM in inputs and inputs[_STREAM].any():
            wanted = f"false: this model sends one response; use {self._settings.forward_to} for a stream"
            raise InvalidInputError(_STREAM, True, wanted)
        given: dict[str, Any] = json.loads(request.parameters() or "{}")
        parameters = {name: value for name, value in given.items() if not is_tritons(name)}
        # The other model gets inputs, so that it must be asked for DESCRIPTION by name.
        outputs = [DESCRIPTION.name] if description.is_wanted(request) else list(request.requested_output_names())
        call = Call(sender, request.request_id(), inputs, outputs, parameters)
        with self._lock:
            self._bound.require(len(self._calls))
            self._calls.add(call)
            gone = CancelledRequestError("the client cancelled the request")
            self._watch.add(call, sender.is_cancelled, partial(self._cancel, call, gone))
            call.task = self._thread.start(self._forward(call))

    async def _forward(self, call: Call) -> None:
        outcome: Tensors | Exception
        with self._lock:
            call.started = True
        try:
            if call.failure is not None:
                raise call.failure
            outcome = await self._ask(call)
        except asyncio.CancelledError:
            outcome = call.failure or unloading()
        except ModelDiedError:
            outcome = self._dead()
        except Exception as error:  # noqa: BLE001  whatever happens, the client is answered
            outcome = error.with_traceback(None)
        with self._lock:
            self._calls.remove(call)
        # On the sending thread: `remove` waits for a check of Triton that runs, and no check may follow the response.
        before = partial(self._watch.remove, call)
        if isinstance(outcome, Exception):
            self._responder.fail(call.sender, outcome, before, call.parameters.get(FORWARDED) is True)
        else:
            self._responder.send(call.sender, partial(self._response, call, outcome), call.arrived, before=before)

    async def _ask(self, call: Call) -> Tensors:
        # A request to stop has no other input. It finds the request of that id on whichever node that runs.
        inputs = call.inputs if _STOP_ID in call.inputs else {**call.inputs, _STREAM: np.array([False])}
        timeout_s = self._settings.forward_timeout_s
        target = self._settings.forward_to
        return await self._client.first(ModelCall(target, inputs, timeout_s, call.outputs, call.parameters, call.name))

    def _cancel(self, call: Call, failure: ShapeshiftError) -> None:
        """End the call here and, through gRPC, in the other model; its client gets `failure`."""
        with self._lock:
            call.failure = failure
            # A task that is cancelled before its first step would never run, nor answer.
            if call.started and call.task is not None:
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
            await asyncio.sleep(_PROBE_PERIOD_S)
            in_flight = list(self._calls)
            try:
                died = await self._died() if in_flight else None
            except Exception as error:  # noqa: BLE001  without the probe requests would wait for a dead process
                self._log(f"a probe of {self._settings.forward_to} failed: {type(error).__name__}: {error}")
                continue
            failed = failed + 1 if died is not None else 0
            if died is not None and (isinstance(died, ModelDiedError) or failed >= _FAILED_PROBES):
                self._log(f"{self._settings.forward_to} does not answer: {len(in_flight)} requests fail ({died})")
                for call in in_flight:
                    self._cancel(call, self._dead())

    def _dead(self) -> OverloadedError:
        return OverloadedError(f"model {self._settings.forward_to} has died; retry later")

    async def _died(self) -> ShapeshiftError | None:
        """The error that shows that the other model is dead or stuck, None where it answers."""
        nobody = {_STOP_ID: np.array([uuid.uuid4().hex.encode()], dtype=object)}
        # As if another node had asked: it is this node's model that must answer.
        probing = {FROM_NODE: self._name}
        call = ModelCall(self._settings.forward_to, nobody, _PROBE_TIMEOUT_S, parameters=probing)
        try:
            await self._client.first(call)
        except (ModelDiedError, OverloadedError) as error:
            return error
        except ShapeshiftError:
            # Any other error is an answer: there is no request of that id.
            return None
        return None

    def _response(self, call: Call, outputs: Tensors) -> InferenceResponse:
        if DESCRIPTION.name in outputs:
            told = description.forwarded(outputs[DESCRIPTION.name][0], self._name)
            outputs[DESCRIPTION.name] = np.array([told], dtype=object)
        tensors = [self._pb_utils.Tensor(name, values) for name, values in outputs.items()]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)
