"""The one asynchronous gRPC client: every call has a time limit, can be cancelled, and blocks no thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from shapeshift.errors import EngineError, InvalidInputError, ShapeshiftError, TimedOutError
from shapeshift.serving.error_codes import FORWARDED, error_of
from shapeshift.triton.endpoint import Tls

T = TypeVar("T")
Tensors = dict[str, NDArray[Any]]

_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "CANCELLED": "CANCELLED",
}
_RECONNECT_MS = 500
# A machine that has gone, or a process that is frozen, closes no connection. Between two messages gRPC asks twice at
# this pace, then once a minute: a Triton with its default options ends a connection that is asked more often.
_KEEPALIVE_MS = 5000
_OPTIONS = (
    *((f"grpc.max_{direction}_message_length", -1) for direction in ("send", "receive")),
    # Never connect through a web proxy; find a restarted server within a second.
    ("grpc.enable_http_proxy", 0),
    *((f"grpc.{kind}_reconnect_backoff_ms", _RECONNECT_MS) for kind in ("initial", "min", "max")),
    # keepalive_timeout_ms does nothing in this gRPC.
    *((f"grpc.{name}_ms", _KEEPALIVE_MS) for name in ("keepalive_time", "http2.ping_timeout")),
)
# The calls of a channel that a new one has replaced end within this time.
_LONGEST_CALL_S = 3600.0
_DEADLINE = "DEADLINE_EXCEEDED"
_INT64 = 1 << 63
# Names that the server would take for its own, and not give to a model.
_RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
_RESERVED_PREFIX = "triton_"


@dataclass(frozen=True)
class ModelCall:
    """One inference request.

    outputs: the requested ones, all where empty; timeout_s: seconds until it is given up; trace: the header of the span
    that it belongs to, empty for none.
    """

    model: str
    inputs: Mapping[str, NDArray[Any]]
    timeout_s: float
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""
    trace: str = ""


class AsyncClient:
    """Calls the models of the server at `url`, HOST:PORT of its gRPC interface, on the event loop that first calls one.

    Cancelling a task cancels its call on the server, that of a decoupled model included. The calls of a server that has
    frozen fail after 10 s, at the latest after 70 s. tls: None for plain text; calls after its files were replaced use
    the new ones.
    """

    def __init__(self, url: str, tls: Tls | None = None) -> None:
        self.url = url
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._stamp: tuple[int, ...] = ()
        self._ending: set[asyncio.Task[None]] = set()

    async def infer(self, call: ModelCall) -> Tensors:
        """The outputs of a model that answers once, not to be written to.

        Raises TimedOutError after `timeout_s`, InvalidInputError for what cannot be sent, else the errors of
        `error_codes.error_of`.
        """
        message = message_of(call)
        try:
            return tensors_of(
                await self._service().ModelInfer(message, timeout=call.timeout_s, metadata=_metadata(call))
            )
        except grpc.RpcError as error:
            raise _error(call, error) from None

    async def stream(self, call: ModelCall) -> AsyncGenerator[Tensors, None]:
        """Each response of a decoupled model. Raises as `infer` does; leaving the loop early cancels the call."""
        async with contextlib.aclosing(self.responses(call)) as responses:
            async for tensors, _ in responses:
                yield tensors

    async def responses(self, call: ModelCall) -> AsyncGenerator[tuple[Tensors, bool], None]:
        """As `stream`; with each response, whether the model has said that it is the last one."""
        messages_sent = _once(message_of(call))
        responses = self._service().ModelStreamInfer(messages_sent, timeout=call.timeout_s, metadata=_metadata(call))
        try:
            async for response in responses:
                if response.error_message:
                    raise error_of(response.error_message)
                yield tensors_of(response.infer_response), is_last(response.infer_response)
        except grpc.RpcError as error:
            raise _error(call, error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC cancels the calls of a connection that is closed.
            raise EngineError(f"model {call.model}: the connection was closed before its last response") from None
        finally:
            responses.cancel()

    async def first(self, call: ModelCall) -> Tensors:
        """The first response of a decoupled model that sends one for this request. Raises as `infer` does."""
        first = await first_of(self.stream(call))
        if first is None:
            raise error_of(f"{call.model} ended its responses without one")
        return first

    async def models(self, timeout_s: float) -> list[str]:
        """The names of the models that are loaded. Raises as `infer` does."""
        request = messages.ModelStatisticsRequest()
        try:
            loaded = (await self._service().ModelStatistics(request, timeout=timeout_s)).model_stats
        except grpc.RpcError as error:
            raise _failure("the server", timeout_s, error) from None
        return sorted({one.name for one in loaded})

    async def is_live(self, timeout_s: float) -> bool:
        """Whether the server answers."""
        try:
            return bool((await self._service().ServerLive(messages.ServerLiveRequest(), timeout=timeout_s)).live)
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Close the connection; its calls in flight end with an error. Those of a renewed one end by themselves."""
        if self._channel is not None:
            await self._channel.close()

    def _service(self) -> Any:
        # A channel belongs to the event loop on which it is made.
        stamp = self._tls.stamp() if self._tls is not None else ()
        if self._channel is None or stamp != self._stamp:
            if self._channel is not None:
                # Its calls end as they would have.
                task = asyncio.create_task(self._channel.close(_LONGEST_CALL_S))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
            self._channel, self._stamp = _channel(self.url, self._tls), stamp
            self._stub = GRPCInferenceServiceStub(self._channel)
        return self._stub


class ClientThread:
    """An event loop with a thread of its own, for callers that have none. `start` may be called from any thread.

    close: closes the clients that its tasks call.
    """

    def __init__(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._close = close
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc-client", daemon=True)
        self._thread.start()

    def start(self, task: Coroutine[Any, Any, None]) -> Future[None]:
        """Run `task` on the event loop. Cancel the returned future to cancel it."""
        return asyncio.run_coroutine_threadsafe(task, self._loop)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks, close the clients and end the thread; nothing happens where it has ended."""
        if not self._thread.is_alive():
            return
        self.start(self._shut_down())
        self._thread.join(timeout_s)

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._close()
        self._loop.stop()


async def first_of(responses: AsyncGenerator[T, None]) -> T | None:
    """The first one, once all have come; None without any.

    The stream is read to its end: Triton 24.10 never gives back some memory of each stream that is cancelled.
    """
    first: T | None = None
    async with contextlib.aclosing(responses):
        async for response in responses:
            first = response if first is None else first
    return first


def _channel(url: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(url, options=_OPTIONS)
    tls.require_files()
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in (tls.ca, tls.key, tls.certificate)))
    return grpc.aio.secure_channel(url, credentials, options=_OPTIONS)


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message


def message_of(call: ModelCall) -> Any:
    """The ModelInferRequest of a call.

    Raises InvalidInputError for a parameter or a type of values that the protocol has no place for.
    """
    message = messages.ModelInferRequest(model_name=call.model, id=call.request_id)
    for name, values in call.inputs.items():
        datatype = np_to_triton_dtype(values.dtype)
        if datatype is None:
            raise InvalidInputError(name, str(values.dtype), "numbers, true or false, or bytes")
        message.inputs.add(name=name, datatype=datatype, shape=values.shape)
        message.raw_input_contents.append(_raw(values))
    for name in call.outputs:
        message.outputs.add(name=name)
    for name, value in {**call.parameters, FORWARDED: True}.items():
        setattr(message.parameters[name], *_parameter(name, value))
    return message


def _metadata(call: ModelCall) -> tuple[tuple[str, str], ...] | None:
    return (("traceparent", call.trace),) if call.trace else None


def tensors_of(response: Any) -> Tensors:
    """The outputs of a ModelInferResponse by name, not to be written to."""
    contents = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _values(raw, output.datatype).reshape(output.shape) for output, raw in contents}


def is_last(response: Any) -> bool:
    """Whether the model has said that this ModelInferResponse is the last one of its stream."""
    return bool(response.parameters["triton_final_response"].bool_param)


def _parameter(name: str, value: Any) -> tuple[str, bool | int | float | str]:
    """The field of the protocol for `value`, and the value; refused before gRPC, which tells a stream no reason."""
    if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
        raise InvalidInputError(f"parameter {name}", value, "a name that is not Triton's own")
    if isinstance(value, bool):
        return "bool_param", value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return "int64_param", value
    if isinstance(value, float):
        return "double_param", value
    if isinstance(value, str):
        return "string_param", value
    raise InvalidInputError(f"parameter {name}", value, "a text, a number, or true or false; of at most 64 bits")


def _values(raw: bytes, datatype: str) -> NDArray[Any]:
    # Not by tritonclient's InferResult, which goes over all outputs for each: a third of what a token costs a client.
    if datatype == "BYTES":
        return np.asarray(deserialize_bytes_tensor(raw))
    return np.frombuffer(raw, triton_to_np_dtype(datatype))


def _raw(values: NDArray[Any]) -> bytes:
    if values.dtype != np.object_ and values.dtype.type is not np.bytes_:
        return values.tobytes()
    return bytes(serialize_byte_tensor(values).item()) if values.size else b""


def _error(call: ModelCall, error: grpc.aio.AioRpcError) -> ShapeshiftError:
    return _failure(f"model {call.model}", call.timeout_s, error)


def _failure(callee: str, timeout_s: float, error: grpc.aio.AioRpcError) -> ShapeshiftError:
    name = error.code().name
    if name == _DEADLINE:
        return TimedOutError(f"{callee} gave no answer within {timeout_s:g} s; retry later")
    return error_of(str(error.details()), _CODES.get(name, ""))
