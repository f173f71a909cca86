"""The front of a model that answers plain inference requests by asking the one that generates."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Sequence as Some
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.errors import InvalidInputError, OverloadedError
from shapeshift.fused_decode.settings import ForwardSettings
from shapeshift.serving import log, replies
from shapeshift.serving.cancellations import CancellationWatch
from shapeshift.serving.metrics import Counter, Gauge, Histogram, MetricsFlusher, RequestMeters
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.sender import SenderThread

_STOP_ID, _STREAM = "stop_id", "stream"
Outputs = list[tuple[str, Any]]


@dataclass(eq=False)
class Call:
    """One request under way: what its caller sent, and the id under which it is forwarded."""

    sender: Any
    name: str
    inputs: dict[str, Any]
    outputs: list[str]
    parameters: dict[str, Any]
    arrived: float = field(default_factory=time.monotonic)
    forward_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class UnaryFront:
    """Forwards each request with stream=false, for which the other model sends exactly one response.

    A thread waits inside Triton for each request under way: the server has no call that does not.
    """

    def __init__(self, pb_utils: Any, args: ModelArgs) -> None:
        self._pb_utils = pb_utils
        self._log = log.of_model(pb_utils, args.name)
        settings.refuse_unknown(args.parameters, settings.names(ForwardSettings))
        self._own = settings.read(ForwardSettings, args.parameters)
        self._names = [tensor["name"] for tensor in args.config["input"]]
        self._calls: dict[str, Call] = {}
        self._lock = threading.Lock()
        self._forwards = ThreadPoolExecutor(self._own.forward_requests, "forward")
        self._stops = ThreadPoolExecutor(1, "stop")
        self._sender = SenderThread(pb_utils, self._log)
        self._watch = CancellationWatch(self._log)
        self._meters = RequestMeters("prompts", 1, 0)
        exported: list[Counter | Gauge | Histogram] = [
            self._meters.latency_ms,
            *self._meters.answered.values(),
            Gauge("requests_running", "Requests under way", lambda: len(self._calls)),
        ]
        self._metrics = MetricsFlusher(pb_utils, args.name, exported, self._log)

    def execute(self, requests: Some[Any]) -> None:
        """Forward every request; those that cannot be are answered with an error at once."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except Exception as error:  # noqa: BLE001  one bad request must not cost the others
                self._reply_failure(sender, replies.code_name(error), replies.text_of(error))

    def close(self) -> None:
        """Wait for what is under way, which the other model ends, then stop."""
        self._watch.close()
        self._forwards.shutdown()
        self._stops.shutdown()
        self._sender.close()
        self._metrics.close()

    def _submit(self, request: Any, sender: Any) -> None:
        found = {name: self._pb_utils.get_input_tensor_by_name(request, name) for name in self._names}
        # Copied: Triton's buffers are gone once `execute` has returned.
        inputs = {name: np.array(tensor.as_numpy()) for name, tensor in found.items() if tensor is not None}
        if _STREAM in inputs and inputs[_STREAM].any():
            wanted = f"false: this model sends one response; ask {self._own.forward_to} for a stream"
            raise InvalidInputError(_STREAM, True, wanted)
        parameters = json.loads(request.parameters() or "{}")
        call = Call(sender, request.request_id(), inputs, list(request.requested_output_names()), parameters)
        if _STOP_ID in inputs:
            self._stops.submit(self._forward_stop, call)
            return
        with self._lock:
            if len(self._calls) >= self._own.forward_requests:
                limit = self._own.forward_requests
                raise OverloadedError(f"forward_requests: {limit} requests are under way, no more may be; retry later")
            self._calls[call.forward_id] = call
        self._watch.add(call, sender.is_cancelled, partial(self._stops.submit, self._stop, call))
        self._forwards.submit(self._forward, call)

    def _forward(self, call: Call) -> None:
        outcome = self._ask(call, {**call.inputs, _STREAM: np.array([False])}, call.forward_id)
        self._watch.remove(call)
        with self._lock:
            del self._calls[call.forward_id]
        self._reply(call, outcome)

    def _forward_stop(self, call: Call) -> None:
        """End the requests that came here under that id, or else those that the other model has of it."""
        name = call.inputs[_STOP_ID].reshape(-1)[0]
        with self._lock:
            named = [forward_id for forward_id, other in self._calls.items() if other.name.encode() == name]
        outcomes = [self._ask(call, {**call.inputs, **_stop_id(stop_id)}) for stop_id in named]
        self._reply(call, outcomes[0] if outcomes else self._ask(call, call.inputs))

    def _stop(self, call: Call) -> None:
        """The caller has gone. A request that has not reached the other model yet is stopped a little later."""
        self._ask(call, _stop_id(call.forward_id))
        if call.forward_id in self._calls:
            self._watch.add(call, lambda: True, partial(self._stops.submit, self._stop, call))

    def _ask(self, call: Call, inputs: dict[str, Any], request_id: str = "") -> Outputs | str:
        """The outputs of the other model's one response, or the text of what went wrong."""
        try:
            asked = self._pb_utils.InferenceRequest(
                model_name=self._own.forward_to,
                request_id=request_id,
                inputs=[self._pb_utils.Tensor(name, values) for name, values in inputs.items()],
                requested_output_names=call.outputs,
                parameters={**call.parameters, "forwarded": True},
            )
            response = next(iter(asked.exec(decoupled=True)))
            if response.has_error():
                return str(response.error().message())
            # Copied: the other model's buffers go with its response.
            return [(tensor.name(), np.array(tensor.as_numpy())) for tensor in response.output_tensors()]
        except Exception as error:  # noqa: BLE001  whatever Triton raises, the caller must hear of it
            return str(error)

    def _reply(self, call: Call, outcome: Outputs | str) -> None:
        if isinstance(outcome, str):
            self._reply_failure(call.sender, *replies.parted(outcome))
        else:
            self._sender.submit(call.sender, partial(self._response, outcome), partial(self._served, call))

    def _response(self, outputs: Outputs) -> Any:
        tensors = [self._pb_utils.Tensor(name, values) for name, values in outputs]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _reply_failure(self, sender: Any, code: str, text: str) -> None:
        error = replies.coded_error(self._pb_utils, code, text)
        make = partial(self._pb_utils.InferenceResponse, error=error)
        self._sender.submit(sender, make, self._meters.answered[code].add)

    def _served(self, call: Call) -> None:
        self._meters.latency_ms.observe((time.monotonic() - call.arrived) * 1e3)
        self._meters.answered["OK"].add()


def _stop_id(name: str) -> dict[str, Any]:
    return {_STOP_ID: np.array([name.encode()], dtype=object)}
