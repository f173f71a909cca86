"""Open-loop replay over gRPC: requests are sent at their intended instants, regardless of answers.

Every latency counts from the *intended* instant, so neither a slow server nor a late client can hide delay. Requests
are serialised before the clock starts, and answers are not parsed: the client may share its processor with the server.

Beside the gRPC status names, a request can end as `IN_FLIGHT_LIMIT` (never sent: `max_in_flight` others were
unanswered) or `UNANSWERED` (still open `drain_s` after the last intended instant, then cancelled).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from client.clock import Alarm
from client.report import OK, Report
from shapeshift.errors import ShapeshiftError
from shapeshift.settings import require

Parameter = str | bool | int | float

IN_FLIGHT_LIMIT = "IN_FLIGHT_LIMIT"
UNANSWERED = "UNANSWERED"

INFER = "/inference.GRPCInferenceService/ModelInfer"
_LIVE = "/inference.GRPCInferenceService/ServerLive"
_CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_LEAD_S = 0.05
_NO_PARAMETERS: Mapping[str, Parameter] = MappingProxyType({})


class ReplayError(ShapeshiftError):
    """The server is unreachable, or every warm-up request fails."""


@dataclass(frozen=True)
class PlannedRequest:
    """A request and the instant to send it, in seconds from the start.

    `inputs` are whole tensors by name; arrays of objects (str or bytes) become BYTES. Requests that share both mapping
    objects are serialised once.
    """

    at_s: float
    inputs: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: _NO_PARAMETERS)


async def replay(
    url: str,
    model: str,
    requests: Sequence[PlannedRequest],
    *,
    outputs: Sequence[str] = (),
    timeout_s: float = 30.0,
    drain_s: float = 30.0,
    max_in_flight: int = 4096,
    warmup: int = 8,
    connect_timeout_s: float = 10.0,
    keep_answers: bool = False,
) -> Report:
    """Send `requests` to `model` at `url` (host:port of the gRPC endpoint) and report the outcome of each.

    First sends `warmup` of them one after another, unmeasured. `outputs` names the requested tensors, by default all. A
    request ends as DEADLINE_EXCEEDED `timeout_s` after it is sent. Returns at most `drain_s` after the last intended
    instant, unless the client is late. Raises InvalidInputError if `requests` is empty or not in the order of `at_s`,
    and ReplayError if no server answers within `connect_timeout_s` or no warm-up request succeeds.
    """
    at_s = np.array([request.at_s for request in requests], dtype=np.float64)
    require(len(requests) > 0, "requests", "none", "at least one request is needed")
    require(bool(np.all(np.diff(at_s, prepend=0.0) >= 0)), "at_s", at_s, "must be from 0 and not decrease")
    require(max_in_flight >= 1, "max_in_flight", max_in_flight, "must be at least 1")
    require(timeout_s > 0, "timeout_s", timeout_s, "must be above 0")
    require(drain_s > 0, "drain_s", drain_s, "must be above 0")

    payloads = serialise(model, requests, outputs)
    async with grpc.aio.insecure_channel(url, options=_CHANNEL_OPTIONS) as channel:
        await _connect(channel, url, connect_timeout_s)
        infer = channel.unary_unary(INFER)
        await _warm_up(infer, [payloads[k % len(payloads)] for k in range(warmup)], timeout_s)
        run = _Run(infer, at_s, payloads, timeout_s, max_in_flight, keep_answers)
        return await run.all(drain_s)


def serialise(model: str, requests: Sequence[PlannedRequest], outputs: Sequence[str] = ()) -> list[bytes]:
    """The serialised ModelInferRequest of each request; requests with the same mapping objects share one."""
    messages: dict[tuple[int, int], bytes] = {}
    payloads = []
    for request in requests:
        key = (id(request.inputs), id(request.parameters))
        if key not in messages:
            messages[key] = _message(model, request, outputs).SerializeToString()
        payloads.append(messages[key])
    return payloads


class _Run:
    """One replay and its records."""

    def __init__(
        self,
        infer: Any,
        at_s: NDArray[np.float64],
        payloads: list[bytes],
        timeout_s: float,
        max_in_flight: int,
        keep_answers: bool,
    ) -> None:
        self._infer = infer
        self._at_s = at_s
        self._payloads = payloads
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._sent_s = np.full(len(payloads), np.nan)
        self._done_s = np.full(len(payloads), np.nan)
        self._kind = [UNANSWERED] * len(payloads)
        self._messages: dict[str, str] = {}
        self._answers: list[bytes | None] | None = [None] * len(payloads) if keep_answers else None
        self._open: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        self._start = 0.0

    async def all(self, drain_s: float) -> Report:
        """Send all requests, wait for the answers, report."""
        # Otherwise a garbage collection would traverse all prepared requests and delay sends.
        gc.collect()
        gc.freeze()
        cpu = time.process_time()
        self._start = time.monotonic() + _LEAD_S
        try:
            await self._send()
            await self._drain(self._start + float(self._at_s[-1]) + drain_s)
            if self._broken is not None:
                raise self._broken
        finally:
            gc.unfreeze()
            for task in self._open:
                task.cancel()
        return Report(
            intended_s=self._at_s,
            sent_s=self._sent_s,
            done_s=self._done_s,
            kind=np.array(self._kind, dtype=np.str_),
            messages=self._messages,
            cpu_s=time.process_time() - cpu,
            answers=() if self._answers is None else tuple(self._answers),
        )

    async def _send(self) -> None:
        with Alarm() as alarm:
            for index, instant in enumerate((self._start + self._at_s).tolist()):
                await alarm.wait_until(instant)
                if len(self._open) >= self._max_in_flight:
                    self._fail(index, IN_FLIGHT_LIMIT, f"{self._max_in_flight} requests are unanswered")
                    continue
                self._sent_s[index] = time.monotonic() - self._start
                call = self._infer(self._payloads[index], timeout=self._timeout_s)
                task = asyncio.create_task(self._receive(index, call))
                self._open.add(task)
                task.add_done_callback(self._close)

    async def _receive(self, index: int, call: Any) -> None:
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            self._fail(index, error.code().name, error.details() or "")
            return
        self._done_s[index] = time.monotonic() - self._start
        self._kind[index] = OK
        if self._answers is not None:
            self._answers[index] = answer

    async def _drain(self, end: float) -> None:
        await asyncio.sleep(0)
        if not self._open:
            return
        _, unanswered = await asyncio.wait(self._open, timeout=max(0.0, end - time.monotonic()))
        if unanswered:
            self._messages[UNANSWERED] = "cancelled by the client at the end of the replay"

    def _close(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()

    def _fail(self, index: int, kind: str, message: str) -> None:
        self._done_s[index] = time.monotonic() - self._start
        self._kind[index] = kind
        self._messages.setdefault(kind, message)


async def _connect(channel: Any, url: str, timeout_s: float) -> None:
    # Cheaper than channel_ready(), which keeps a core busy. An error is an answer too: health may be restricted.
    try:
        await channel.unary_unary(_LIVE)(b"", timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ReplayError(
                f"no inference server answers at {url} within {timeout_s:g} s; check that this is its gRPC port"
            ) from None


async def _warm_up(infer: Any, payloads: list[bytes], timeout_s: float) -> None:
    failures = []
    for payload in payloads:
        try:
            await infer(payload, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            failures.append(error)
    if payloads and len(failures) == len(payloads):
        first = failures[0]
        raise ReplayError(
            f"all {len(failures)} warm-up requests failed; the first: {first.code().name}: {first.details()}"
        )


def _message(model: str, request: PlannedRequest, outputs: Sequence[str]) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, array in request.inputs.items():
        datatype = np_to_triton_dtype(array.dtype)
        require(datatype is not None, name, array.dtype, "must have a data type that Triton supports")
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(_content(array, datatype))
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in request.parameters.items():
        _set(message.parameters[name], value)
    return message


def _content(array: NDArray[Any], datatype: str) -> bytes:
    if datatype == "BYTES" and array.size > 0:
        content: bytes = serialize_byte_tensor(array).item()
        return content
    return array.tobytes()


def _set(parameter: Any, value: Parameter) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    else:
        parameter.double_param = value
