"""Fronts of two nodes in this process: each request is served on the node that is best for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor

from shapeshift import __version__
from shapeshift.errors import InvalidInputError, NotFoundError, OverloadedError, ShapeshiftError
from shapeshift.fleet.forwarding.entry import FleetEntry
from shapeshift.fleet.policy.placement import UNREAD_MARGIN
from shapeshift.serving.description import GENERATION, Description
from shapeshift.serving.events import TRACES_VARIABLE, Event
from shapeshift.serving.front import Affinity, Client, Front
from shapeshift.serving.metrics import RequestMetrics
from shapeshift.serving.model_args import FLEET_FILE_VARIABLE, NODE_VARIABLE, ModelArgs
from shapeshift.serving.responses import SingleResponse
from tests import fakes, waiting
from tests.fleet import fleet_files
from tests.recording import recording
from tests.serving.otlp import Receiver

wait_for = partial(waiting.wait_for, pause_s=0.01)
PERIOD_S = 0.1
TEXT, ID = "text_output", "request_id"


def _bytes(text: str) -> np.ndarray:
    return np.array([text.encode()], dtype=object)


class FakeFront(Front[Any]):
    """A front that says on which node it is: at once, or once `open` is set. `refusal`: raised instead."""

    takes = ("lora_name",)
    id_output = ID

    def __init__(self, name: str, stream: bool) -> None:
        config = {"input": [{"name": "text_input"}], "output": [{"name": TEXT}], "max_batch_size": 0}
        super().__init__(fakes.PbUtils(), ModelArgs("model", Path(), config, {}, "CPU", 0))
        self.stream = stream  # type: ignore[misc]
        self.stop_id = "stop_id" if stream else ""
        self.name = name
        self.lines: list[str] = []
        self.log = fakes.logger(self.lines)
        self.waiting = self.unread = 0.0
        self.precision = "f32"
        self.checkpoint = "0123"
        self.served: list[Any] = []
        self.asked = 0
        self.refusal: ShapeshiftError | None = None
        self.open = threading.Event()
        self.open.set()
        self.begin(RequestMetrics("texts", 8, 0))
        self.peers: Any

    def enter(self, request: Any) -> None:
        fakes.send_returned([request], self.execute([request]))

    def ask(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> fakes.Request:
        request = fakes.Request((TEXT, ID), parameters, "mine", decoupled=self.stream, **inputs)
        self.enter(request)
        return request

    def parse(self, request: Any, given: Any, client: Client) -> Any:
        self.asked += 1
        if self.refusal is not None:
            raise self.refusal
        self.served.append((request, given))
        pieces = [f"{self.name}-{number}" for number in range(3 if self.stream else 1)]
        return partial(self._answer, request, client.sender, pieces)

    def start(self, job: Any) -> None:
        # It sends its responses by itself.
        self.watch.remove(job)
        threading.Thread(target=job, daemon=True).start()

    def describe(self) -> Description:
        return Description(GENERATION, precision=self.precision, checkpoint_version=self.checkpoint)

    def load(self) -> float:
        return self.waiting

    def cancel(self, job: Any) -> None: ...

    def respond(self, job: Any) -> Any: ...

    def metrics(self) -> list[Any]:
        return []

    def steps(self) -> list[Any]:
        return []

    def stop(self) -> None: ...

    def _answer(self, request: Any, sender: Any, pieces: list[str]) -> None:
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            if last:
                self.open.wait(30)
            tensors = [fakes.Tensor(TEXT, _bytes(piece)), fakes.Tensor(ID, _bytes(request.request_id()))]
            make = partial(self.pb_utils.InferenceResponse, tensors)
            if last:
                self.responder.post([SingleResponse(sender, make)])
            else:
                sender.send(make(), 0)


class Node(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Triton's protocol in front of a FakeFront."""

    def __init__(self, front: FakeFront) -> None:
        self.front = front
        self.cancelled = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        asked = self._request(request, context, decoupled=False)
        context.add_callback(lambda: setattr(asked.sender, "cancelled", True))
        self.front.enter(asked)
        (response,) = asked.sender.stream()
        if (error := response.error()) is not None:
            codes = {2: grpc.StatusCode.NOT_FOUND, 3: grpc.StatusCode.INVALID_ARGUMENT, 4: grpc.StatusCode.UNAVAILABLE}
            context.abort(codes[error.code()], error.message())
        return self._answer(response, True)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802  Triton's name
        asked = self._request(next(iter(requests)), context, decoupled=True)
        context.add_callback(lambda: self._cancel(asked))
        self.front.enter(asked)
        sent = 0
        while True:
            ended = asked.sender.has_ended
            found = asked.sender.responses[sent:]
            for number, response in enumerate(found):
                sent += 1
                last = ended and number == len(found) - 1
                if (error := response.error()) is not None:
                    yield service_pb2.ModelStreamInferResponse(error_message=error.message())
                else:
                    yield service_pb2.ModelStreamInferResponse(infer_response=self._answer(response, last))
            if ended or asked.sender.cancelled:
                return
            time.sleep(0.005)

    def _cancel(self, asked: Any) -> None:
        if not asked.sender.has_ended:
            self.cancelled += 1
            asked.sender.cancelled = True

    def _request(self, request: Any, context: Any, decoupled: bool) -> fakes.Request:
        inputs = {
            one.name: deserialize_bytes_tensor(raw).reshape(list(one.shape))
            for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        given = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in request.parameters.items()}
        names = [one.name for one in request.outputs]
        asked = fakes.Request(names, given, request.id, decoupled=decoupled, **inputs)
        asked.trace_header = dict(context.invocation_metadata()).get("traceparent", "")
        return asked

    def _answer(self, response: Any, last: bool) -> Any:
        answer = service_pb2.ModelInferResponse(model_name="model")
        answer.parameters["triton_final_response"].bool_param = last
        for tensor in response.output_tensors():
            values = tensor.as_numpy()
            answer.outputs.add(name=tensor.name(), datatype=np_to_triton_dtype(values.dtype), shape=values.shape)
            answer.raw_output_contents.append(serialize_byte_tensor(values).item())
        return answer


class Fleet:
    """The nodes `names`, a and b; requests enter at a."""

    def __init__(self, file: Path, stream: bool, patched: pytest.MonkeyPatch, names: str = "ab") -> None:
        self.fronts = {name: FakeFront(name, stream) for name in names}
        self.nodes = {name: Node(front) for name, front in self.fronts.items()}
        addresses = {name: f"127.0.0.1:{node.port}" for name, node in self.nodes.items()}
        fleet_files.write(file, {name: (address, f"http://{address}/metrics") for name, address in addresses.items()})
        patched.setenv(FLEET_FILE_VARIABLE, str(file))
        for name, front in self.fronts.items():
            patched.setenv(NODE_VARIABLE, name)
            front.peers = FleetEntry(front, PERIOD_S)
        self.a, self.b = self.fronts["a"], self.fronts["b"]
        wait_for(lambda: {*self.loads(), "a"} == {*names})

    def loads(self) -> dict[str, float]:
        """What a knows of the others."""
        return self.a.peers.others.loads()

    def passed_on(self) -> float:
        """Requests of a that others serve now."""
        (gauge,) = [one for one in self.a.peers.metrics if "requests_on_other_nodes" in getattr(one, "name", "")]
        return float(gauge.read())

    def busy(self, load: float = 10.0) -> None:
        """Let a have so much work that its requests go to b."""
        self.a.waiting = load

    def close(self) -> None:
        for front in self.fronts.values():
            front.open.set()
            front.peers.close()
            front.peers = None
        for node in self.nodes.values():
            node.close()
        for front in self.fronts.values():
            front.close()


@pytest.fixture(params=[False, True], ids=["unary", "stream"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    found = Fleet(tmp_path / "fleet.toml", request.param, monkeypatch)
    yield found
    found.close()


@pytest.fixture
def streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    found = Fleet(tmp_path / "fleet.toml", True, monkeypatch)
    yield found
    found.close()


def texts(request: fakes.Request) -> list[str]:
    """What the client read; it has to be the id of its own request that comes with it."""
    found = [fakes.values_of(response) for response in request.sender.stream()]
    assert {one[ID].item() for one in found} == {b"mine"}
    return [one[TEXT].item().decode() for one in found]


def code(request: fakes.Request) -> int:
    """That of the error with which the request ended."""
    error = request.sender.stream()[-1].error()
    assert error is not None
    return error.code()


def on(node: str, fleet: Fleet) -> list[str]:
    return [f"{node}-{number}" for number in range(3 if fleet.a.stream else 1)]


def test_a_request_stays_where_there_is_little_work(fleet: Fleet) -> None:
    assert texts(fleet.a.ask(text_input=_bytes("x"))) == on("a", fleet)
    assert fleet.b.served == []


def test_a_request_goes_to_the_node_with_less_work_and_no_further(fleet: Fleet) -> None:
    fleet.busy()
    # Node b has more work yet: what another node has passed on is served.
    fleet.b.waiting = 5.0
    wait_for(lambda: fleet.loads() == {"b": 5.0})
    assert texts(fleet.a.ask({"latency_ms": 50, "binary_data": True}, text_input=_bytes("x"))) == on("b", fleet)
    ((request, given),) = fleet.b.served
    assert request.tensors["text_input"].as_numpy().tolist() == [b"x"]
    assert (given.latency_ms, given.from_node) == (50, "a")
    assert [one.value for one in fleet.a.peers.metrics[0].each()] == [1.0]
    wait_for(lambda: fleet.b.peers.others.loads() == {"a": 10.0})
    fleet.b.waiting = 100.0
    assert texts(fleet.b.ask({"from_node": "a"}, text_input=_bytes("x"))) == on("b", fleet)


def test_what_was_passed_on_counts_until_the_node_says_so_itself(fleet: Fleet) -> None:
    fleet.busy()
    fleet.b.open.clear()
    asked = [fleet.a.ask(text_input=_bytes("x")) for _ in range(3)]
    wait_for(lambda: len(fleet.b.served) == 3)
    assert fleet.passed_on() == 3
    fleet.b.open.set()
    for request in asked:
        assert texts(request) == on("b", fleet)
    wait_for(lambda: not fleet.passed_on())
    wait_for(lambda: fleet.loads() == {"b": 0.0})


@pytest.mark.parametrize("refusal", [OverloadedError("full"), NotFoundError("no adapter")])
def test_what_a_node_refuses_is_served_here(fleet: Fleet, refusal: ShapeshiftError) -> None:
    fleet.busy()
    fleet.b.refusal = refusal
    assert texts(fleet.a.ask(text_input=_bytes("x"))) == on("a", fleet)


def test_an_invalid_request_is_refused_once_with_its_code(fleet: Fleet) -> None:
    fleet.busy()
    fleet.b.refusal = InvalidInputError("text", 1, "a text")
    code, text = fleet.a.ask(text_input=_bytes("x")).refusal()
    assert code == fakes.TritonError.INVALID_ARG
    assert text == "text: got 1; a text"
    assert fleet.a.served == []


def test_a_node_that_goes_costs_no_request_that_it_has_not_begun(fleet: Fleet) -> None:
    fleet.busy()
    fleet.nodes["b"].close()
    # Before anybody has noticed.
    assert texts(fleet.a.ask(text_input=_bytes("x"))) == on("a", fleet)
    wait_for(lambda: fleet.loads() == {})
    assert any("node b" in line for line in fleet.a.lines)


def test_a_stream_that_breaks_is_an_error(streams: Fleet) -> None:
    streams.busy()
    streams.b.open.clear()
    request = streams.a.ask(text_input=_bytes("x"))
    wait_for(lambda: len(request.sender.responses) == 2)
    streams.nodes["b"].close()
    *begun, last = request.sender.stream()
    assert len(begun) == 2 and last.has_error()
    assert streams.a.served == []


def test_a_stream_is_passed_on_as_it_comes(streams: Fleet) -> None:
    streams.busy()
    streams.b.open.clear()
    request = streams.a.ask(text_input=_bytes("x"))
    wait_for(lambda: len(request.sender.responses) == 2)
    streams.b.open.set()
    assert texts(request) == on("b", streams)


def test_a_cancelled_request_is_cancelled_on_its_node(streams: Fleet) -> None:
    streams.busy()
    streams.b.open.clear()
    request = streams.a.ask(text_input=_bytes("x"))
    wait_for(lambda: len(request.sender.responses) == 2)
    request.sender.cancelled = True
    assert code(request) == fakes.TritonError.CANCELLED
    wait_for(lambda: streams.nodes["b"].cancelled == 1)
    assert not streams.passed_on()


def test_a_request_to_stop_goes_where_the_request_is(streams: Fleet) -> None:
    streams.busy()
    streams.b.open.clear()
    request = streams.a.ask(text_input=_bytes("x"))
    wait_for(lambda: streams.b.served)
    id_there = streams.b.served[0][0].request_id()
    assert id_there != "mine"
    streams.busy(0.0)
    streams.a.ask(stop_id=_bytes("mine"))
    wait_for(lambda: len(streams.b.served) == 2)
    assert streams.b.served[1][0].tensors["stop_id"].as_numpy().tolist() == [id_there.encode()]
    streams.b.open.set()
    request.sender.stream()


def test_a_request_to_stop_that_reaches_another_node_finds_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path / "fleet.toml", True, monkeypatch, "abc")
    try:
        a, b, c = fleet.fronts.values()
        a.refusal = b.refusal = NotFoundError("stop_id: no request 'yours' waits or runs")
        # The node with the least work is not the one that has the request.
        fleet.busy()
        a.ask(stop_id=_bytes("yours")).sender.stream()
        ((request, given),) = c.served
        assert request.tensors["stop_id"].as_numpy().tolist() == [b"yours"]
        assert given.from_node == "a"
        assert (a.asked, b.asked, c.asked) == (1, 1, 1)
        wait_for(lambda: not fleet.passed_on())
    finally:
        fleet.close()


def test_a_request_to_stop_that_nobody_has_is_not_found_after_one_round(streams: Fleet) -> None:
    streams.a.refusal = streams.b.refusal = NotFoundError("stop_id: no request 'yours' waits or runs")
    assert streams.a.ask(stop_id=_bytes("yours")).refusal()[0] == fakes.TritonError.NOT_FOUND
    assert streams.b.asked == 1
    # What another node asks goes no further, nor does what asks nobody to stop.
    assert code(streams.a.ask({"from_node": "b"}, stop_id=_bytes("yours"))) == fakes.TritonError.NOT_FOUND
    assert code(streams.a.ask(text_input=_bytes("x"))) == fakes.TritonError.NOT_FOUND
    assert streams.b.asked == 1
    assert not streams.passed_on()


@pytest.mark.parametrize(
    ("changed", "other", "told"),
    [
        ("precision", "bf16", "precision 'bf16', here 'f32'"),
        ("checkpoint", "4567", "checkpoint_version '4567', here '0123'"),
    ],
)
def test_a_node_that_serves_something_else_is_not_used(streams: Fleet, changed: str, other: str, told: str) -> None:
    setattr(streams.b, changed, other)
    wait_for(lambda: streams.loads() == {})
    streams.busy()
    assert texts(streams.a.ask(text_input=_bytes("x"))) == on("a", streams)
    (line,) = [line for line in streams.a.lines if "another one" in line]
    assert f"node b: its model is another one and is not used: {told}" in line


def test_a_node_that_no_longer_answers_is_given_up(fleet: Fleet) -> None:
    fleet.busy()
    fleet.b.open.clear()
    request = fleet.a.ask(text_input=_bytes("x"))
    wait_for(lambda: fleet.b.served)
    held = fleet.b.peers.describe
    waiting_here = threading.Event()
    fleet.b.peers.describe = lambda: waiting_here.wait(30) and held()
    if fleet.a.stream:
        assert code(request) == fakes.TritonError.UNAVAILABLE
    else:
        # It had not begun.
        assert texts(request) == on("a", fleet)
    waiting_here.set()


def test_a_front_that_closes_answers_what_others_serve(fleet: Fleet) -> None:
    fleet.busy()
    fleet.b.open.clear()
    request = fleet.a.ask(text_input=_bytes("x"))
    wait_for(lambda: fleet.b.served)
    fleet.a.peers.close()
    assert code(request) == fakes.TritonError.UNAVAILABLE


def test_a_key_chooses_the_node(fleet: Fleet) -> None:
    for front in fleet.fronts.values():
        _with_affinity(front)
    wait_for(lambda: fleet.a.peers.others.unread_tokens() == {"b": 0.0})
    found = {name: texts(fleet.a.ask({"lora_name": name}, text_input=_bytes("x")))[0][0] for name in "klmnopqrst"}
    assert {*found.values()} == {"a", "b"}
    assert found == {name: texts(fleet.a.ask({"lora_name": name}, text_input=_bytes("x")))[0][0] for name in found}


def test_a_key_leaves_a_node_with_much_to_read(fleet: Fleet) -> None:
    for front in fleet.fronts.values():
        _with_affinity(front)
    ask = lambda name: texts(fleet.a.ask({"lora_name": name}, text_input=_bytes("x")))[0][0]  # noqa: E731
    wait_for(lambda: fleet.a.peers.others.unread_tokens() == {"b": 0.0})
    of_a = next(name for name in "klmnopqrst" if ask(name) == "a")
    fleet.a.unread = UNREAD_MARGIN
    assert ask(of_a) == "b"
    # What b tells counts, and what was passed on to it since.
    fleet.b.unread = 1.0
    wait_for(lambda: fleet.a.peers.others.unread_tokens() == {"b": 1.0})
    assert ask(of_a) == "a"
    fleet.a.unread = UNREAD_MARGIN + 1
    assert ask(of_a) == "b"


def test_a_prompt_that_was_passed_on_counts_until_the_node_tells(fleet: Fleet) -> None:
    for front in fleet.fronts.values():
        _with_affinity(front)
    wait_for(lambda: fleet.a.peers.others.unread_tokens() == {"b": 0.0})
    others = fleet.a.peers.others
    # It asks no more.
    others.close()
    before = others.unread_tokens()["b"]
    fleet.busy()
    texts(fleet.a.ask(text_input=_bytes("x" * 40)))
    assert others.unread_tokens()["b"] == before + 40


def _with_affinity(front: FakeFront) -> None:
    key: Callable[[Any], str] = lambda request: json.loads(request.parameters() or "{}").get("lora_name", "")  # noqa: E731
    size: Callable[[Any], float] = lambda request: len(request.inputs()[0].as_numpy()[0])  # noqa: E731
    front.affinity = Affinity(key, size, lambda: front.unread)


def test_nodes_are_recorded_for_the_live_page(fleet: Fleet, tmp_path: Path) -> None:
    with recording(tmp_path / "events") as reader:
        records: list[Event] = []

        def sees_both() -> bool:
            records.extend(reader.read())
            return any(len(one.values["rows"]) == 2 for one in records)

        wait_for(sees_both)
    rows = {row[0]: row[1:] for row in records[-1].values["rows"]}
    assert rows.keys() == {"a", "b"} and all(row[0] and row[2] == __version__ for row in rows.values())
    here = next(name for name, row in rows.items() if row[3] == 0)
    assert {name for name, row in rows.items() if row[3] > 0} == {*"ab"} - {here}


def test_a_node_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLEET_FILE_VARIABLE, str(tmp_path / "fleet.toml"))
    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    with pytest.raises(InvalidInputError, match=NODE_VARIABLE):
        FakeFront("a", False)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_hop_is_a_span_between_those_of_two_servers(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver()
    monkeypatch.setenv(TRACES_VARIABLE, receiver.url)
    fleet = Fleet(tmp_path / "fleet.toml", stream, monkeypatch)
    try:
        fleet.busy()
        request = fakes.Request((TEXT, ID), None, "mine", decoupled=stream, text_input=_bytes("x"))
        request.trace_header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        fleet.a.enter(request)
        assert texts(request) == on("b", fleet)
        untraced = fleet.a.ask(text_input=_bytes("x"))
        assert texts(untraced) == on("b", fleet)
        fleet.b.refusal = InvalidInputError("text", 1, "a text")
        refused = fakes.Request((TEXT, ID), None, "bad", decoupled=stream, text_input=_bytes("x"))
        refused.trace_header = request.trace_header
        fleet.a.enter(refused)
        assert refused.refusal()[0] == fakes.TritonError.INVALID_ARG
    finally:
        fleet.close()
        receiver.close()
    (failed,) = receiver.named("model", node="b", outcome="INVALID_ARG")
    assert failed.failed
    (hop,) = receiver.named("model", node="b", outcome="OK")
    assert (hop.trace, hop.parent) == tuple(request.trace_header.split("-")[1:3])
    headers = [there.trace_header for there, _ in fleet.b.served]
    assert headers == [f"00-{hop.trace}-{hop.id}-01", ""]
