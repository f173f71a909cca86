"""How the asynchronous client ends the streams of decoupled models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shapeshift.triton.async_client import AsyncClient, ModelCall


class Decoupled(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Sends one response, and ends the stream only later. ended: how the streams ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:  # noqa: N802
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


def test_the_first_response_is_returned_once_its_stream_has_ended() -> None:
    model = Decoupled()

    async def ask() -> list[float]:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(model, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = AsyncClient(f"127.0.0.1:{port}")
        try:
            return [float((await client.first(ModelCall("m", {}, 20.0)))["OUT"][0]) for _ in range(3)]
        finally:
            await client.close()
            await server.stop(5)

    assert asyncio.run(ask()) == [7.0, 7.0, 7.0]
    assert model.ended == ["complete"] * 3, "Triton keeps memory of cancelled streams"
