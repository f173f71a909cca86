"""Our server as a system of `bench.fused_decode`: its models, and clients that measure them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from bench.common.models import SHIPPED, generator, write_front
from bench.common.output import empty
from bench.fused_decode.loads import MAX_LENGTH, SLOTS, Answers, Load
from bench.peers.protocol import LEAD_S, DecodeRequest, Replayed
from client.open_loop import INFER, PlannedRequest, serialise
from shapeshift.errors import UnsupportedError

GENERATE, GENERATE_UNARY = "generate", "generate_unary"
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


class TritonStreams:
    """Our model behind Triton: a gRPC stream for each request, read by an asyncio client in this process.

    Also reported: the responses.
    """

    stream = True

    def __init__(self, url: str, model: str, tokenizer: Path) -> None:
        from tokenizers import Tokenizer

        self._url = url
        self._model = model
        self._text = Tokenizer.from_file(str(tokenizer)).decode

    def replay(self, load: Load) -> Answers:
        planned = [
            PlannedRequest(request.at_s, self._inputs(request), self._parameters(request)) for request in load.requests
        ]
        payloads = serialise(self._model, planned)
        return Answers(load, asyncio.run(self._replay(load.requests, payloads)))

    def _parameters(self, request: DecodeRequest) -> dict[str, str]:
        return {}

    def _inputs(self, request: DecodeRequest) -> dict[str, Any]:
        return {
            "text_input": np.array([self._text(request.prompt).encode()], dtype=np.object_),
            "stream": np.array([self.stream]),
            "max_tokens": np.array([request.new_tokens], np.int32),
            "temperature": np.array([0.0], np.float32),
            "ignore_eos": np.array([True]),
            "return_num_output_tokens": np.array([True]),
        }

    async def _replay(self, requests: Sequence[DecodeRequest], payloads: Sequence[bytes]) -> Replayed:
        async with grpc.aio.insecure_channel(self._url) as channel:
            # The time to connect is not measured.
            await channel.channel_ready()
            start = time.perf_counter() + LEAD_S
            tasks = (self._answer(channel, start, *one) for one in zip(requests, payloads, strict=True))
            stamps = await asyncio.gather(*tasks)
        responses = sum(len(set(of_one)) for of_one in stamps)
        return Replayed(stamps, [[] for _ in requests], {"responses": float(responses)})

    async def _answer(self, channel: Any, start: float, request: DecodeRequest, payload: bytes) -> list[float]:
        await asyncio.sleep(start + request.at_s - time.perf_counter())
        call = channel.stream_stream(_STREAM)()
        await call.write(payload)
        stamps: list[float] = []
        while len(stamps) < request.new_tokens:
            answer = service_pb2.ModelStreamInferResponse.FromString(await call.read())
            if answer.error_message:
                raise UnsupportedError(f"{self._model}: {answer.error_message}")
            stamps += [time.perf_counter() - start] * _tokens(answer.infer_response)
        await call.done_writing()
        # Triton 24.10 keeps what belongs to a stream that its client gives up.
        await call.read()
        return stamps


class TritonUnary(TritonStreams):
    """The model that forwards plain requests to ours: one response each, when all its tokens are there."""

    stream = False

    async def _answer(self, channel: Any, start: float, request: DecodeRequest, payload: bytes) -> list[float]:
        await asyncio.sleep(start + request.at_s - time.perf_counter())
        answer = service_pb2.ModelInferResponse.FromString(await channel.unary_unary(INFER)(payload))
        return [time.perf_counter() - start] * _tokens(answer)


def _tokens(response: Any) -> int:
    """The number of tokens in a response."""
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "num_output_tokens":
            return int(np.frombuffer(content, np.uint32)[0])
    return 0


def publish(checkpoint: Path, precision: str, repository: Path) -> None:
    """Write the `generate` model over `checkpoint`, and the one that forwards to it, to a repository of their own."""
    empty(repository)
    write_front(SHIPPED / GENERATE, repository / GENERATE, generator(checkpoint, precision, SLOTS, MAX_LENGTH))
    write_front(SHIPPED / GENERATE_UNARY, repository / GENERATE_UNARY, {})
