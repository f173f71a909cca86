"""The one asynchronous gRPC client: every call has a time limit, can be cancelled, and blocks no thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from shapeshift.errors import EngineError, InvalidInputError, ShapeshiftError, TimedOutError
from shapeshift.serving.error_codes import error_of
from shapeshift.triton.endpoint import Tls
from shapeshift.triton.tls import client_options

Tensors = dict[str, NDArray[Any]]
T = TypeVar("T")

_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "CANCELLED": "CANCELLED",
}
_INT64 = 1 << 63
_RECONNECT_MS = 500
_OPTIONS = (
    *((f"grpc.max_{direction}_message_length", -1) for direction in ("send", "receive")),
    # Never connect through a web proxy; find a restarted server within a second.
    ("grpc.enable_http_proxy", 0),
    *((f"grpc.{kind}_reconnect_backoff_ms", _RECONNECT_MS) for kind in ("initial", "min", "max")),
)
_DEADLINE = "DEADLINE_EXCEEDED"


@dataclass(frozen=True)
class ModelCall:
    """One inference request. outputs: the requested ones, all where empty; timeout_s: seconds until it is given up."""

    model: str
    inputs: Mapping[str, NDArray[Any]]
    timeout_s: float
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""


class AsyncClient:
    """Calls the models of the server at `url`, HOST:PORT of its gRPC interface, on the event loop that first calls one.

    Cancelling a task cancels its call on the server, that of a decoupled model included. tls: None for plain text.
    keepalive_s: a server that is silent for so many seconds is asked for a sign; without one for as many seconds again
    the connection is made anew. None: never.
    """

    def __init__(self, url: str, tls: Tls | None = None, keepalive_s: float | None = None) -> None:
        self.url = url
        self._tls = tls
        self._options = list(_OPTIONS)
        if keepalive_s is not None:
            self._options += [(f"grpc.keepalive_{name}_ms", int(keepalive_s * 1e3)) for name in ("time", "timeout")]
        self._client: InferenceServerClient | None = None

    async def infer(self, call: ModelCall) -> Tensors:
        """The outputs of a model that answers once.

        Raises TimedOutError after `timeout_s`, InvalidInputError for a parameter that cannot be sent, else the errors
        of `error_codes.error_of`.
        """
        request = _request(call)
        try:
            return _tensors(await self._connection().infer(**request, client_timeout=call.timeout_s))
        except InferenceServerException as error:
            raise _error(call, str(error.message()), str(error.status())) from None

    async def stream(self, call: ModelCall) -> AsyncGenerator[Tensors, None]:
        """Each response of a decoupled model. Raises as `infer` does; leaving the loop early cancels the call."""
        async with contextlib.aclosing(self.responses(call)) as responses:
            async for tensors, _ in responses:
                yield tensors

    async def responses(self, call: ModelCall) -> AsyncGenerator[tuple[Tensors, bool], None]:
        """As `stream`; with each response, whether the model has said that it is the last one."""
        request = _request(call)
        responses = self._connection().stream_infer(_once(request), stream_timeout=call.timeout_s)
        try:
            async for result, error in responses:
                if error is not None:
                    raise _error(call, str(error.message()), "")
                yield _tensors(result), _is_last(result)
        except grpc.RpcError as error:
            raise _error(call, str(error.details()), f"StatusCode.{error.code().name}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC cancels a call whose request cannot be made, and keeps the reason.
            raise EngineError(f"the request to model {call.model} could not be sent") from None
        finally:
            responses.cancel()

    async def first(self, call: ModelCall) -> Tensors:
        """The first response of a decoupled model that sends one for this request. Raises as `infer` does."""
        found = await first_of(self.stream(call))
        if found is None:
            raise error_of(f"{call.model} ended its responses without one")
        return found

    async def models(self, timeout_s: float) -> list[str]:
        """The names of the models that are loaded. Raises as `infer` does."""
        try:
            found = await self._connection().get_inference_statistics(client_timeout=timeout_s)
        except InferenceServerException as error:
            raise _failure("the server", timeout_s, str(error.message()), str(error.status())) from None
        return sorted({one.name for one in found.model_stats})

    async def is_live(self, timeout_s: float) -> bool:
        """Whether the server answers."""
        try:
            return bool(await self._connection().is_server_live(client_timeout=timeout_s))
        except InferenceServerException:
            return False

    async def close(self) -> None:
        """Close the connection; calls in flight end with an error."""
        if self._client is not None:
            await self._client.close()

    def _connection(self) -> InferenceServerClient:
        # A channel belongs to the event loop on which it is made.
        if self._client is None:
            self._client = InferenceServerClient(self.url, channel_args=self._options, **client_options(self._tls))
        return self._client


async def first_of(responses: AsyncGenerator[T, None]) -> T | None:
    """The first one, once all have come; None without any.

    The stream is read to its end: Triton 24.10 never gives back some memory of each stream that is cancelled.
    """
    first: T | None = None
    async with contextlib.aclosing(responses):
        async for response in responses:
            first = response if first is None else first
    return first


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _request(call: ModelCall) -> dict[str, Any]:
    return {
        "model_name": call.model,
        "inputs": [_input(name, values) for name, values in call.inputs.items()],
        "outputs": [InferRequestedOutput(name) for name in call.outputs] or None,
        "request_id": call.request_id,
        "parameters": {name: _parameter(name, value) for name, value in call.parameters.items()} or None,
    }


def _parameter(name: str, value: Any) -> bool | int | float | str:
    """`value`, if the protocol has a place for it; refused before gRPC, which tells a stream nothing of its reason."""
    if not isinstance(value, bool | int | float | str) or (isinstance(value, int) and not -_INT64 <= value < _INT64):
        raise InvalidInputError(f"parameter {name}", value, "a text, a number, or true or false; of at most 64 bits")
    return value


def _input(name: str, values: NDArray[Any]) -> Any:
    tensor = InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor


def _tensors(result: Any) -> Tensors:
    names = [output.name for output in result.get_response().outputs]
    return {name: np.asarray(result.as_numpy(name)) for name in names}


def _is_last(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def _error(call: ModelCall, text: str, status: str) -> ShapeshiftError:
    return _failure(f"model {call.model}", call.timeout_s, text, status)


def _failure(asked: str, timeout_s: float, text: str, status: str) -> ShapeshiftError:
    name = status.removeprefix("StatusCode.")
    if name == _DEADLINE:
        return TimedOutError(f"{asked} gave no answer within {timeout_s:g} s; retry later")
    return error_of(text, _CODES.get(name, ""))
