"""What the asynchronous client sends, and what it makes of each answer, against a server in this process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from subprocess import PIPE
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shapeshift.errors import EngineError, ModelError, ModelGoneError, ShapeshiftError, TimedOutError
from shapeshift.triton.async_client import AsyncClient, ModelCall, first_of

T = TypeVar("T")
IN = {"IN": np.array([1.0, 2.0], np.float32)}
CALL = ModelCall("m", IN, 20.0, ("OUT",), {"task": "a"}, "7")


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers IN again as OUT. refuses: the status of every answer; streamed: what a stream gives, texts are errors."""

    def __init__(self, refuses: grpc.StatusCode | None = None, streamed: tuple[float | str, ...] = (1.0, 2.0)) -> None:
        self.asked: list[Any] = []
        self.connections: set[str] = set()
        self._refuses, self._streamed = refuses, streamed

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._note(request, context)
        answer = service_pb2.ModelInferResponse(raw_output_contents=request.raw_input_contents)
        answer.outputs.add(name="OUT", datatype="FP32", shape=[2])
        return answer

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            await self._note(request, context)
            for number, value in enumerate(self._streamed, 1):
                answer = service_pb2.ModelStreamInferResponse()
                if isinstance(value, str):
                    answer.error_message = value
                else:
                    answer.infer_response.outputs.add(name="OUT", datatype="FP32", shape=[1])
                    answer.infer_response.raw_output_contents.append(np.float32(value).tobytes())
                    if number == len(self._streamed):
                        answer.infer_response.parameters["triton_final_response"].bool_param = True
                yield answer

    async def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._note(request, context)
        answer = service_pb2.ModelStatisticsResponse()
        for name, version in (("b", "12"), ("a", "1"), ("b", "3")):
            if request.name in ("", name):
                answer.model_stats.add(name=name, version=version)
        return answer

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._note(request, context)
        return service_pb2.ServerLiveResponse(live=True)

    async def _note(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        self.connections.add(context.peer())
        if self._refuses is not None:
            await context.abort(self._refuses, "its reason")


def asked(server: Server, ask: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
    """What `ask` returns, with a client of `server`."""

    async def serve() -> T:
        running = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server, running)
        port = running.add_insecure_port("127.0.0.1:0")
        await running.start()
        client = AsyncClient(f"127.0.0.1:{port}")
        try:
            return await ask(client)
        finally:
            await client.close()
            await running.stop(0)

    return asyncio.run(serve())


def test_a_call_is_sent_whole_and_its_answer_read() -> None:
    server = Server()
    assert asked(server, lambda client: client.infer(CALL))["OUT"].tolist() == [1.0, 2.0]
    (request,) = server.asked
    assert (request.model_name, request.id, [one.name for one in request.outputs]) == ("m", "7", ["OUT"])
    assert request.parameters["task"].string_param == "a"


def test_calls_of_one_client_share_its_connection() -> None:
    async def twice(client: AsyncClient) -> None:
        await client.infer(CALL)
        await client.infer(CALL)

    server = Server()
    asked(server, twice)
    assert len(server.asked) == 2 and len(server.connections) == 1


async def responses_of(client: AsyncClient) -> list[tuple[float, bool]]:
    return [(float(tensors["OUT"][0]), last) async for tensors, last in client.responses(CALL)]


async def streamed(client: AsyncClient) -> list[float]:
    return [float(tensors["OUT"][0]) async for tensors in client.stream(CALL)]


def test_a_stream_gives_each_response_and_says_which_is_the_last() -> None:
    server = Server(streamed=(1.0, 2.0, 3.0))
    assert asked(server, responses_of) == [(1.0, False), (2.0, False), (3.0, True)]
    assert asked(server, streamed) == [1.0, 2.0, 3.0]
    assert [request.model_name for request in server.asked] == ["m", "m"]


def test_an_error_within_a_stream_ends_it() -> None:
    with pytest.raises(ModelError, match="^IN: too long$") as caught:
        asked(Server(streamed=(1.0, "[INVALID_ARG] IN: too long", 3.0)), streamed)
    assert caught.value.code == "INVALID_ARG"


@pytest.mark.parametrize("values", [(5.0,), (5.0, 6.0, 7.0)])
def test_the_first_response_is_the_first(values: tuple[float, ...]) -> None:
    assert asked(Server(streamed=values), lambda client: client.first(CALL))["OUT"].tolist() == [5.0]


def test_a_stream_without_a_response_is_an_error() -> None:
    with pytest.raises(EngineError, match="^m ended its responses without one$"):
        asked(Server(streamed=()), lambda client: client.first(CALL))


def test_without_responses_there_is_no_first_one() -> None:
    async def of(*values: int) -> AsyncIterator[int]:
        for value in values:
            yield value

    found = [asyncio.run(_first(of(*values))) for values in ((), (0,), (3, 4))]
    assert found == [None, 0, 3]


async def _first(responses: Any) -> int | None:
    found: int | None = await first_of(responses)
    return found


@pytest.mark.parametrize("how", ["infer", "first", "models"])
@pytest.mark.parametrize(
    ("status", "raised", "code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, ModelError, "INVALID_ARG"),
        (grpc.StatusCode.UNIMPLEMENTED, ModelError, "UNSUPPORTED"),
        (grpc.StatusCode.NOT_FOUND, ShapeshiftError, None),
        (grpc.StatusCode.INTERNAL, EngineError, None),
    ],
)
def test_a_status_becomes_one_of_our_errors(
    status: grpc.StatusCode, raised: type[ShapeshiftError], code: str | None, how: str
) -> None:
    ask = (lambda client: client.models(20.0)) if how == "models" else lambda client: getattr(client, how)(CALL)
    with pytest.raises(raised, match="its reason") as caught:
        asked(Server(status), ask)
    assert getattr(caught.value, "code", None) == code or code is None


def test_a_time_limit_names_the_model_and_the_limit() -> None:
    short = ModelCall("m", IN, 0.25)
    refusing = Server(grpc.StatusCode.DEADLINE_EXCEEDED)
    for how in ("infer", "first"):
        with pytest.raises(TimedOutError, match=r"^model m gave no answer within 0.25 s; retry later$"):
            asked(refusing, lambda client, how=how: getattr(client, how)(short))  # type: ignore[misc]
    with pytest.raises(TimedOutError, match="^the server gave no answer within 2.5 s; retry later$"):
        asked(refusing, lambda client: client.models(2.5))


def test_models_are_named_once_in_order() -> None:
    assert asked(Server(), lambda client: client.models(20.0)) == ["a", "b"]


def test_a_server_is_live_where_it_answers() -> None:
    assert asked(Server(), lambda client: client.is_live(20.0)) is True
    assert asked(Server(grpc.StatusCode.UNAVAILABLE), lambda client: client.is_live(20.0)) is False


def test_a_client_that_never_called_can_be_closed() -> None:
    asyncio.run(AsyncClient("127.0.0.1:1").close())


FROZEN = """
import sys
from concurrent import futures
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

    def ModelInfer(self, request, context):
        print("asked", flush=True)
        sys.stdin.read()

server = grpc.server(futures.ThreadPoolExecutor(2))
service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


def test_the_calls_of_a_frozen_server_fail() -> None:
    """Such as a process that a signal has stopped, or a machine without power: nothing closes the connection."""
    with subprocess.Popen([sys.executable, "-c", FROZEN], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout
        port = int(output.readline())

        async def call() -> None:
            client = AsyncClient(f"127.0.0.1:{port}")
            assert await client.is_live(20.0)
            waiting = asyncio.create_task(client.infer(ModelCall("m", IN, 300.0)))
            assert await asyncio.to_thread(output.readline) == "asked\n"
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(ShapeshiftError) as raised:
                await waiting
            # Long before the call's own limit.
            assert not isinstance(raised.value, TimedOutError)
            await client.close()

        try:
            asyncio.run(call())
        finally:
            process.kill()


def test_a_model_that_is_not_loaded_is_gone() -> None:
    class Gone(Server):
        async def _note(self, request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'm' is not ready")

    with pytest.raises(ModelGoneError):
        asked(Gone(), lambda client: client.infer(CALL))
