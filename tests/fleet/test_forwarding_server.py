"""Two real Tritons, each a node of one fleet: the fronts of either serve what is sent to one of them."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from shapeshift.triton import metrics
from tests import waiting
from tests.conftest import BUILD
from tests.polymorph.fleet_nodes import running_fleet

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.05)

# Four decode processes and two servers: forwarding itself is tested with fakes beside it.
pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(300)]

MODELS = ("generate", "generate_lora", "generate_lora_unary", "classify_text", "classify_text_large", "classify_image")
FRONTS = ("generate", "generate_lora", "classify_text", "classify_image")
PROMPT = 'def mean(values):\n    """'
Servers = dict[str, "TritonServer"]


@pytest.fixture(scope="module")
def nodes(make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The nodes a and b, with the demo's models."""
    for needed in (BUILD / "repository" / name for name in MODELS):
        if not needed.is_dir():
            pytest.skip(f"no {needed}: run `make engines`")
    folder, repository = tmp_path_factory.mktemp("fleet"), BUILD / "repository"
    with running_fleet(make_server, folder, dict.fromkeys("ab", repository), MODELS) as fleet:
        found = fleet.servers
        wait_for(lambda: [metric(found["a"], "shapeshift_fleet_nodes", name) for name in FRONTS] == [2] * len(FRONTS))
        yield found


def metric(server: TritonServer, name: str, model: str) -> float:
    samples = metrics.scrape(server.metrics_url)
    return sum(value for (series, own), value in samples.items() if series == name and ("model", model) in own)


def tensors(**arrays: Any) -> list[Any]:
    found = []
    for name, values in arrays.items():
        kind = {"O": "BYTES", "b": "BOOL", "i": "INT32", "f": "FP32"}[values.dtype.kind]
        found.append(grpc_client.InferInput(name, values.shape, kind))
        found[-1].set_data_from_numpy(values)
    return found


def texts_of(*rows: bytes) -> np.ndarray:
    return np.array([[row] for row in rows], dtype=object)


def generate(server: TritonServer, model: str = "generate", tokens: int = 32, **parameters: Any) -> list[str]:
    """The pieces of a greedy answer, as they came."""
    inputs = tensors(
        text_input=np.array([PROMPT.encode()], dtype=object),
        stream=np.array([True]),
        temperature=np.array([0.0], np.float32),
        max_tokens=np.array([tokens], np.int32),
    )
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, inputs, parameters=parameters, enable_empty_final_response=True)
        pieces = []
        while True:
            result, error = answers.get(timeout=60)
            assert error is None, error
            text = result.as_numpy("text_output")
            if text is not None:
                pieces.append(text.reshape(-1)[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                client.stop_stream()
                return pieces


def classify(server: TritonServer, model: str, inputs: Sequence[Any], **parameters: Any) -> list[bytes]:
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        found = client.infer(model, inputs, client_timeout=60, parameters=parameters)
    return list(found.as_numpy("LABEL").reshape(-1).tolist())


def at_once(ask: Callable[[], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: ask(), range(count)))


def test_streams_are_shared_and_say_the_same(nodes: Servers) -> None:
    expected = "".join(generate(nodes["b"], from_node="test"))
    found = at_once(lambda: generate(nodes["a"]), 8)
    assert {"".join(pieces) for pieces in found} == {expected}
    # A stream from another node is a stream.
    assert min(map(len, found)) > 2
    wait_for(lambda: metric(nodes["a"], "shapeshift_requests_forwarded_total", "generate") >= 2)
    # Nobody sends back what it was given.
    assert metric(nodes["b"], "shapeshift_requests_forwarded_total", "generate") == 0


def test_an_adapter_has_its_node(nodes: Servers) -> None:
    expected = "".join(generate(nodes["b"], "generate_lora", from_node="test", lora_name="sentiment"))
    wait_for(lambda: metric(nodes["b"], "shapeshift_adapter_requests_total", "generate_lora") == 1)
    before = [0.0, 1.0]
    for node in nodes.values():
        for _ in range(3):
            assert "".join(generate(node, "generate_lora", lora_name="sentiment")) == expected
    wait_for(lambda: sum(served(nodes, before)) == 6)
    assert sorted(served(nodes, before)) == [0, 6]


def served(nodes: Servers, before: Sequence[float]) -> list[float]:
    now = [metric(node, "shapeshift_adapter_requests_total", "generate_lora") for node in nodes.values()]
    return [late - early for late, early in zip(now, before, strict=True)]


def test_a_stop_that_any_node_gets_ends_the_request(nodes: Servers) -> None:
    text, tokens = np.array([PROMPT.encode()], dtype=object), np.array([400], np.int32)
    flag, model = np.array([True]), "generate_lora_unary"
    asked = tensors(text_input=text, max_tokens=tokens, ignore_eos=flag, return_finish_reason=flag)
    with (
        grpc_client.InferenceServerClient(nodes["a"].grpc_url) as client,
        grpc_client.InferenceServerClient(nodes["b"].grpc_url) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        parameters = {"lora_name": "sentiment"}
        answer = pool.submit(client.infer, model, asked, request_id="mine", client_timeout=60, parameters=parameters)
        wait_for(lambda: stopped(other, "mine") or answer.done())
        assert answer.result().as_numpy("finish_reason").item() == b"abort"
        assert not stopped(other, "mine"), "nobody has it any more"


def stopped(client: Any, name: str) -> bool:
    """Whether a request of that id waited or ran, which is now ended."""
    try:
        client.infer("generate_lora_unary", tensors(stop_id=np.array([name.encode()], dtype=object)), client_timeout=60)
    except InferenceServerException as error:
        assert "no request 'mine' waits or runs" in error.message()
        return False
    return True


def test_texts_are_classified_alike_wherever_they_are(nodes: Servers) -> None:
    inputs = tensors(TEXT=texts_of(*[b"what is the exchange rate of dollars to euros"] * 8))
    expected = classify(nodes["b"], "classify_text", inputs, from_node="test")
    for found in until_passed_on(nodes["a"], "classify_text", inputs):
        assert found == expected


def test_images_are_classified_on_both_nodes(nodes: Servers) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (8, 32, 32, 3), dtype=np.uint8)
    inputs = [grpc_client.InferInput("PIXELS", pixels.shape, "UINT8")]
    inputs[0].set_data_from_numpy(pixels)
    # Under load a label may come from fewer tokens, and differ.
    assert all(len(found) == 8 for found in until_passed_on(nodes["a"], "classify_image", inputs))


def until_passed_on(node: TritonServer, model: str, inputs: Sequence[Any]) -> Iterator[list[bytes]]:
    """The answers to requests to `node`, 16 at once, until it has passed some on."""
    for _ in range(20):
        yield from at_once(partial(classify, node, model, inputs), 16)
        if metric(node, "shapeshift_requests_forwarded_total", model) >= 1:
            return
    pytest.fail("the node has passed on nothing")


def test_a_node_that_is_killed_costs_nothing_that_it_had_not_begun(nodes: Servers) -> None:
    """The last test: node b does not come back."""
    expected = "".join(generate(nodes["a"], from_node="test"))
    os.kill(nodes["b"].pid, signal.SIGKILL)
    # Before node a has noticed, and after.
    for _ in range(3):
        assert {"".join(pieces) for pieces in at_once(lambda: generate(nodes["a"]), 6)} == {expected}
    wait_for(lambda: metric(nodes["a"], "shapeshift_fleet_nodes", "generate") == 1)
