"""The traces of a real server and the gateway before it, as a receiver gets them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from tests.conftest import BUILD
from tests.gateway.served import gateway
from tests.serving.otlp import Receiver, Span
from tests.waiting import wait_for

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer
    from shapeshift.triton.settings import ServerSettings

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(300)]

MODELS = ("encode", "classify_image", "generate_lora", "generate_lora_unary", "classify_text", "classify_text_large")
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CLIENT}-01"
# Not all of them are easy for the first level.
INTENTS = (
    "what is the exchange rate of dollars to euros",
    "is my card going to work over there and what might it cost me",
    "tell me something that i could do with that thing from yesterday",
    "will it rain in oslo",
)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


@pytest.fixture(scope="module")
def triton(
    server_settings: Callable[..., ServerSettings], receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    from shapeshift.triton.embedded.server import TritonServer

    for model in MODELS:
        if not (BUILD / "repository" / model).is_dir():
            pytest.skip(f"no {BUILD / 'repository' / model}: run `make engines`")
    settings = server_settings((BUILD / "repository",), MODELS, tmp_path_factory.mktemp("traces") / "build" / "run")
    with TritonServer(replace(settings, traces=receiver.url, trace_rate=1)) as server:
        yield server.wait_ready(timeout_s=240)


def infer(server: TritonServer, model: str, parameters: dict[str, Any], **arrays: np.ndarray) -> None:
    tensors = []
    for name, values in arrays.items():
        kind = {"O": "BYTES", "i": "INT32", "u": "UINT8"}[values.dtype.kind]
        tensors.append(grpc_client.InferInput(name, values.shape, kind))
        tensors[-1].set_data_from_numpy(values)
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        client.infer(model, tensors, parameters=parameters, headers={"traceparent": PARENT}, client_timeout=60)


def texts(*rows: str) -> np.ndarray:
    return np.array([[row.encode()] for row in rows], object)


def last(found: Callable[[], Sequence[Span]]) -> Span:
    """The last of the spans, once there is one: they come a second late."""
    wait_for(found, 60, pause_s=0.1)
    return found()[-1]


def test_a_request_is_followed_from_the_gateway_to_the_engine(
    triton: TritonServer, receiver: Receiver, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    with gateway(triton, port, 3) as url:
        body = json.dumps({"model": "encode", "input": ["a text of some words"]}).encode()
        headers = {"Content-Type": "application/json", "traceparent": PARENT, "X-Request-Id": "seen-in-traces"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/embeddings", body, headers), timeout=60
        ) as answer:
            assert answer.status == 200
    entry = last(lambda: receiver.named("gateway", id="seen-in-traces"))
    assert (entry.trace, entry.parent) == (TRACE, CLIENT)
    assert entry.attributes["path"] == "/v1/embeddings" and entry.attributes["status"] == 200
    span = last(lambda: [one for one in receiver.named("encode") if entry in receiver.above(one)])
    assert span.attributes["outcome"] == "OK" and span.attributes["tokens"] > 5 and span.attributes["bins"]
    # Triton's own spans lie between.
    assert "triton" in {one.service for one in receiver.above(span)}
    parts = receiver.within(span)
    assert parts.keys() == {"queue", "compute", "engine call"} and parts["engine call"].attributes["texts"] == 1
    assert entry.began <= span.began <= parts["compute"].began < parts["compute"].ended <= entry.ended


def test_images_show_what_was_computed_for_them(triton: TritonServer, receiver: Receiver) -> None:
    infer(triton, "classify_image", {"latency_ms": 30000}, PIXELS=np.zeros((2, 4, 4, 3), np.uint8))
    span = last(lambda: receiver.named("classify_image"))
    assert (span.attributes["images"], span.attributes["images_in_time"]) == (2, 2)
    assert span.attributes["gammas"] and receiver.within(span).keys() == {"queue", "compute", "batch"}


def test_each_level_of_a_cascade_is_seen(triton: TritonServer, receiver: Receiver) -> None:
    infer(triton, "classify_text", {}, TEXT=texts(*INTENTS * 8))
    span = last(lambda: receiver.named("classify_text", texts=32))
    parts = receiver.within(span)
    assert span.attributes["levels"] == [1, 2]
    assert parts["level 1"].attributes["texts"] == 32 > parts["level 2"].attributes["texts"] > 0
    assert parts["level 1"].ended <= parts["level 2"].ended
    later = last(lambda: [one for one in receiver.named("classify_text_large") if span in receiver.above(one)])
    assert later.attributes["texts"] == parts["level 2"].attributes["texts"]


def test_generation_shows_its_adapter(triton: TritonServer, receiver: Receiver) -> None:
    prompt = {"text_input": np.array([b"Return"], object), "max_tokens": np.array([4], np.int32)}
    for _ in range(2):
        infer(triton, "generate_lora_unary", {"lora_name": "clock"}, **prompt)
    second = last(lambda: receiver.named("generate_lora", adapter="clock", adapter_hit=True))
    (first,) = receiver.named("generate_lora", adapter="clock", adapter_hit=False)
    assert receiver.within(first).keys() == {"queue", "prefill", "decode", "adapter load"}
    assert receiver.within(second).keys() == {"queue", "prefill", "decode"}
    assert second.attributes["generated"] == 4 and second.attributes["predicted_tokens"] > 0
    forwarding = last(lambda: [one for one in receiver.above(second) if one.name == "generate_lora_unary"])
    assert forwarding.trace == TRACE


def test_a_refusal_is_an_error(triton: TritonServer, receiver: Receiver) -> None:
    with pytest.raises(grpc_client.InferenceServerException):
        infer(triton, "encode", {"latency_ms": -1}, TEXT=texts("a"))
    span = last(lambda: receiver.named("encode", outcome="INVALID_ARG"))
    assert span.failed and span.trace == TRACE
