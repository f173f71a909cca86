"""Requests on the wire, and what came back: over gRPC, HTTP and the generate extension."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import grpc
from tritonclient.grpc import service_pb2

from tests.fuzz.declarations import Request
from tests.fuzz.malformed import encoded

TIMEOUT_S = 60.0
_UNARY = "/inference.GRPCInferenceService/ModelInfer"
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
# Over HTTP the codes are statuses; 500 is INTERNAL, 200 an answer.
_CODED_STATUSES = frozenset({400, 404, 405, 413, 415, 422, 429, 499, 501, 503})
_CODED = frozenset(
    {
        *("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAVAILABLE"),
        *("RESOURCE_EXHAUSTED", "OUT_OF_RANGE", "ALREADY_EXISTS", "FAILED_PRECONDITION"),
    }
)
SERVED, CODED, TRITONS, INTERNAL, NONE = "served", "coded", "coded by Triton", "internal", "no answer"
# What Triton 24.10 refuses itself, before a front sees it, with status 500; on a stream, with a message without a code.
_TRITONS = re.compile(
    "failed to parse the request JSON buffer|Unable to parse '(data|shape)'|attempt to get members for non-object"
    "|unexpected inference (input|output)|already exists in request|unexpected shape for input|input byte size mismatch"
    "|All input dimensions should be specified|data-type is|model version|Request for unknown model|expected number of"
    "|got unexpected numbers of inputs|incomplete string (data|length)|unexpected number of string elements"
    r"|expected \d+ string elements"
)

_CODE_IN_TEXT = re.compile(r"\[([A-Z_]+)\] ")
# What the client's own gRPC says where the server has ended.
_CONNECTION = re.compile("failed to connect|[Ss]ocket closed|[Cc]onnection re|GOAWAY|[Bb]roken pipe")


@dataclass(frozen=True)
class Outcome:
    """How one request ended. kind: SERVED, CODED, TRITONS, INTERNAL or NONE; text: code or status, and the words."""

    kind: str
    text: str


def message(request: Request) -> bytes:
    """A serialised ModelInferRequest with raw contents."""
    made = service_pb2.ModelInferRequest(model_name=request.model, model_version=request.version)
    for tensor in request.inputs:
        shape = [max(-(2**63), min(size, 2**63 - 1)) for size in tensor.shape]
        made.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        made.raw_input_contents.append(tensor.raw if tensor.raw is not None else encoded(tensor))
    for name in request.outputs:
        made.outputs.add(name=name)
    for name, value in request.parameters.items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(made.parameters[name], field, value)
    return bytes(made.SerializeToString())


def infer_body(request: Request) -> bytes:
    """The JSON of an inference request; bytes that are no UTF-8 stay as they are."""
    inputs = []
    for tensor in request.inputs:
        data = [
            value.decode(errors="surrogateescape") if isinstance(value, bytes) else value for value in tensor.values
        ]
        if tensor.raw is not None:
            # JSON has no content that is too short or too long, but values that are.
            data = data[:-1] if len(tensor.raw) < len(encoded(tensor)) else [*data, *data]
        inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "data": data})
    outputs = [{"name": name} for name in request.outputs]
    body: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "parameters": request.parameters}
    return json.dumps(body, ensure_ascii=False).encode(errors="surrogateescape")


def infer_path(request: Request) -> str:
    """The path of an inference request."""
    version = f"/versions/{request.version}" if request.version else ""
    return f"/v2/models/{request.model}{version}/infer"


class Wire:
    """Connections to one server. An async context manager."""

    def __init__(self, grpc_url: str, http_url: str) -> None:
        self._grpc_url, self._http_url = grpc_url, http_url

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._grpc_url)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._session.close()

    async def over_grpc(self, request: Request, streams: bool) -> Outcome:
        """Send it; a front that streams gets it on a stream of its own."""
        try:
            if streams:
                return await self._stream(message(request))
            await self._channel.unary_unary(_UNARY)(message(request), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return _of_code(error.code().name, error.details() or "")
        return Outcome(SERVED, "OK")

    async def over_http(self, path: str, body: bytes) -> Outcome:
        """Post it."""
        try:
            async with self._session.post(f"http://{self._http_url}{path}", data=body) as answer:
                text = (await answer.read()).decode(errors="replace")
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            return Outcome(NONE, repr(error))
        if status == 200 and '"error"' in text:
            # A stream of events whose first one is an error has no status of its own.
            return Outcome(CODED, text)
        kind = SERVED if status == 200 else CODED if status in _CODED_STATUSES else _internal(text)
        return Outcome(kind, f"{status} {text}")

    async def _stream(self, request: bytes) -> Outcome:
        open_stream = self._channel.stream_stream(
            _STREAM, response_deserializer=service_pb2.ModelStreamInferResponse.FromString
        )
        # Without the header `triton_grpc_error`, which makes Triton 24.10 crash: see docs/drill.md.
        call = open_stream(timeout=TIMEOUT_S)
        await call.write(request)
        await call.done_writing()
        async for response in call:
            if response.error_message:
                return _of_message(response.error_message)
        return Outcome(SERVED, "OK")


async def all_at_once(calls: Sequence[Any]) -> list[Outcome]:
    """The outcomes of these calls."""
    return list(await asyncio.gather(*calls))


def _of_code(code: str, text: str) -> Outcome:
    if code == "DEADLINE_EXCEEDED" or _CONNECTION.search(text):
        return Outcome(NONE, f"{code} {text}")
    return Outcome(CODED if code in _CODED else _internal(text), f"{code} {text}")


def _of_message(text: str) -> Outcome:
    """An error as a message of a stream. Ours carry their code, since the requests say `forwarded`."""
    found = _CODE_IN_TEXT.match(text)
    return Outcome(CODED if found and found[1] != "INTERNAL" else _internal(text), text)


def _internal(text: str) -> str:
    return TRITONS if _TRITONS.search(text) else INTERNAL
