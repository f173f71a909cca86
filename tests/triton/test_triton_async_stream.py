"""How the asynchronous client ends the streams of decoupled models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shapeshift.errors import EngineError, ModelGoneError, ShapeshiftError, TimedOutError
from shapeshift.triton.async_client import AsyncClient, ModelCall

T = TypeVar("T")
CALL = ModelCall("m", {}, 20.0)


class Decoupled(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Sends one response, and ends the stream only later. ended: how the streams ended.

    refuses: ends it with this status instead of a response.
    """

    def __init__(self, refuses: grpc.StatusCode | None = None) -> None:
        self.ended: list[str] = []
        self._refuses = refuses

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if self._refuses is not None:
            await context.abort(self._refuses, "its reason")
        try:
            async for _request in requests:
                answer = service_pb2.ModelStreamInferResponse()
                answer.infer_response.outputs.add(name="OUT", datatype="FP32", shape=[1])
                answer.infer_response.raw_output_contents.append(np.float32(7).tobytes())
                yield answer
                await asyncio.sleep(0.05)
            self.ended.append("complete")
        except (asyncio.CancelledError, GeneratorExit):
            self.ended.append("cancelled")
            raise


def asked(model: Decoupled, ask: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
    """What `ask` returns, with a client of a server that serves `model`."""

    async def serve() -> T:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(model, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = AsyncClient(f"127.0.0.1:{port}")
        try:
            return await ask(client)
        finally:
            await client.close()
            await server.stop(5)

    return asyncio.run(serve())


def test_the_first_response_is_returned_once_its_stream_has_ended() -> None:
    async def three_times(client: AsyncClient) -> list[float]:
        return [float((await client.first(CALL))["OUT"][0]) for _ in range(3)]

    model = Decoupled()
    assert asked(model, three_times) == [7.0, 7.0, 7.0]
    assert model.ended == ["complete"] * 3, "Triton keeps memory of cancelled streams"


@pytest.mark.parametrize(
    ("status", "raised"),
    [(grpc.StatusCode.UNAVAILABLE, ModelGoneError), (grpc.StatusCode.DEADLINE_EXCEEDED, TimedOutError)],
)
def test_a_stream_that_is_refused_has_its_code(status: grpc.StatusCode, raised: type[ShapeshiftError]) -> None:
    with pytest.raises(raised):
        asked(Decoupled(status), lambda client: client.first(CALL))


def test_a_closed_connection_ends_a_stream_with_an_error() -> None:
    async def close_within(client: AsyncClient) -> None:
        async for _ in client.stream(CALL):
            await client.close()

    with pytest.raises(EngineError):
        asked(Decoupled(), close_within)


def test_a_cancelled_task_is_cancelled() -> None:
    async def cancel_within(client: AsyncClient) -> bool:
        task = asyncio.create_task(client.first(CALL))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asked(Decoupled(), cancel_within)
