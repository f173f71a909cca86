"""`shapeshift gateway` before a real Triton, with the clients that people use."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpc_client

from shapeshift.engines.text.tokenizer import open_tokenizer
from shapeshift.triton import keys, metrics
from shapeshift.triton.control import ModelControl
from tests.gateway.conftest import HTTP
from tests.gateway.served import BUILD, gateway, models_of, serving
from tests.waiting import wait_for

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

MODELS = ("encode", "generate", "generate_lora")
PROMPT = "Return the number of"


@pytest.fixture(scope="module")
def triton(
    make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    with serving(make_server, MODELS, tmp_path_factory.mktemp("gateway") / "run") as server:
        yield server


@pytest.fixture(scope="module")
def url(triton: TritonServer, free_ports: Callable[[int], list[int]]) -> Iterator[str]:
    with gateway(triton, free_ports(1)[0], len(MODELS)) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_fronts_and_adapters_are_listed(url: str) -> None:
    assert {"encode", "generate", "generate_lora", "generate_lora:sentiment", "sentiment"} <= set(models_of(url))


def test_vectors_are_those_of_sentence_transformers(client: openai.OpenAI, demo_checkpoint: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["A text of any length.", "Another one, which is somewhat longer than the first.", "short"]
    model = SentenceTransformer(str(demo_checkpoint), device="cpu")
    reference = model.encode(texts, normalize_embeddings=True)
    tokens = sum(len(ids) for ids in model.tokenizer(texts)["input_ids"])
    for encoding in ("float", "base64"):
        answer: Any = client.embeddings.create(model="encode", input=texts, encoding_format=encoding)
        assert answer.usage.prompt_tokens == tokens
        rows = [one.embedding for one in answer.data]
        if encoding == "base64":
            rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
        assert (np.array(rows) * reference).sum(axis=1).min() > 0.999


def test_text_is_what_the_model_says_without_a_gateway(client: openai.OpenAI, triton: TritonServer) -> None:
    own = grpc_client.InferenceServerClient(triton.grpc_url)
    answers: list[Any] = []
    inputs = [grpc_client.InferInput("text_input", [1], "BYTES"), grpc_client.InferInput("max_tokens", [1], "INT32")]
    inputs[0].set_data_from_numpy(np.array([PROMPT], dtype=object))
    inputs[1].set_data_from_numpy(np.array([12], np.int32))
    inputs.append(grpc_client.InferInput("temperature", [1], "FP32"))
    inputs[2].set_data_from_numpy(np.zeros(1, np.float32))
    own.start_stream(lambda result, error: answers.append(error or result))
    own.async_stream_infer("generate", inputs)
    wait_for(lambda: answers)
    own.stop_stream()
    wanted = answers[0].as_numpy("text_output")[0].decode()
    asked: dict[str, Any] = {"model": "generate", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True))
    assert whole.choices[0].text == wanted == "".join(piece.choices[0].text for piece in pieces)
    assert whole.usage and whole.usage.completion_tokens == 12 and pieces[-1].choices[0].finish_reason == "length"


def test_tokens_are_those_of_the_tokenizer_and_of_what_the_model_reads(url: str, client: openai.OpenAI) -> None:
    for model, text in (("generate", PROMPT), ("generate_lora:sentiment", PROMPT), ("encode", "Wörds, of any kind 😀")):
        folder = BUILD / ("repository/generate/1" if model != "encode" else "engines/encode")
        reference = open_tokenizer(folder / "tokenizer.json")
        found = HTTP.post(f"{url}/tokenize", json={"model": model, "prompt": text, "return_token_strs": True}).json()
        (tei,) = HTTP.post(f"{url}/tokenize", json={"model": model, "inputs": text}).json()
        encoding = reference.encode(text)
        assert (found["tokens"], found["token_strs"]) == (encoding.ids, encoding.tokens)
        assert [one["id"] for one in tei] == encoding.ids and "".join(text.split()) == "".join(
            one["text"].strip() for one in tei if not one["special"]
        )
        if model != "encode":
            read = client.completions.create(model=model, prompt=text, max_tokens=1).usage
            assert read is not None and found["count"] == read.prompt_tokens
            body = {"model": model, "tokens": found["tokens"]}
            assert HTTP.post(f"{url}/detokenize", json=body).json() == {"prompt": text}
    chat = {"model": "generate", "messages": [{"role": "user", "content": PROMPT}]}
    read = client.chat.completions.create(**chat, max_tokens=1).usage
    assert HTTP.post(f"{url}/tokenize", json=chat).json()["count"] == read.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_an_answer_is_named(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "generate", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    stop = client.completions.create(**asked).choices[0].text[3:6]
    answer: Any = client.completions.create(**asked, stop=["nowhere", stop], stream=stream)
    choice = (list(answer)[-1] if stream else answer).choices[0].model_dump()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


WRONG: dict[str, list[Any]] = {
    "a type that there is not": [{"type": "object", "properties": {"a": {"type": "nonsense"}}}],
    "a reference to nothing": [{"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"]}],
    "1,000 tools": [{"type": "object", "properties": {"value": {"type": "string"}}}] * 1000,
}


@pytest.mark.parametrize("case", WRONG)
def test_schemas_that_no_grammar_is_made_of_are_the_fault_of_the_tools(url: str, case: str) -> None:
    functions = [{"name": f"f{place}", "parameters": schema} for place, schema in enumerate(WRONG[case])]
    bodies: dict[str, Any] = {
        "chat/completions": {"tools": [{"type": "function", "function": one} for one in functions]},
        "responses": {"input": PROMPT, "tools": [{"type": "function", **one} for one in functions]},
        "messages": {"tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]},
    }
    for route, body in bodies.items():
        said = {"messages": [{"role": "user", "content": PROMPT}]} if "input" not in body else {}
        most = {"max_output_tokens" if route == "responses" else "max_tokens": 20}
        choice: Any = {"type": "any"} if route == "messages" else "required"
        asked = {"model": "generate", **said, **most, **body, "tool_choice": choice}
        answer = HTTP.post(f"{url}/v1/{route}", json=asked)
        error = answer.json()["error"]
        field = error["details"]["param"] if route == "messages" else error["param"]
        assert (answer.status_code, field) == (400, "tools"), answer.text[:500]


def test_an_adapter_answers_under_its_name(client: openai.OpenAI) -> None:
    said = {
        name: client.completions.create(model=name, prompt=PROMPT, max_tokens=20, temperature=0).choices[0].text
        for name in ("generate_lora", "generate_lora:sentiment", "sentiment")
    }
    assert said["sentiment"] == said["generate_lora:sentiment"] != said["generate_lora"]


def test_an_answer_that_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = client.completions.create(
        model="generate", prompt=PROMPT, max_tokens=100, seed=1, extra_body={"response_format": format_}
    )
    if found.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(found.choices[0].text)["a"], bool)


@pytest.mark.parametrize("city", ["Paris", "東京", 'the "Big Apple"'])
def test_a_named_tool_and_a_schema_get_what_they_ask_for(client: openai.OpenAI, city: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "days", "unit"],
        "additionalProperties": False,
    }
    request: dict[str, Any] = {
        "model": "generate",
        "messages": [{"role": "user", "content": f"What will the weather be in {city} for the next 3 days?"}],
        "max_tokens": 100,
        "temperature": 0,
    }
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    called = client.chat.completions.create(**request, tools=[tool], tool_choice=choice).choices[0]
    calls = called.message.tool_calls
    assert called.finish_reason == "stop" and calls is not None and calls[0].function.name == "weather"
    format_: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    answered = client.chat.completions.create(**request, response_format=format_).choices[0]
    assert answered.finish_reason == "stop"
    for text in (calls[0].function.arguments, answered.message.content):
        jsonschema.validate(json.loads(str(text)), schema)


def test_one_of_two_tools_is_called_whole_and_streamed(client: openai.OpenAI) -> None:
    schemas: dict[str, Any] = {
        name: {
            "type": "object",
            "properties": {key: {"enum": values}},
            "required": [key],
            "additionalProperties": False,
        }
        for name, key, values in (("weather", "unit", ["C", "F"]), ("news", "topic", ["sports", "music"]))
    }
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in schemas.items()]
    request: dict[str, Any] = {
        "model": "generate",
        "messages": [{"role": "user", "content": "Is it warm?"}],
        "max_tokens": 100,
        "temperature": 0,
        "tools": tools,
        "tool_choice": "required",
    }
    whole = client.chat.completions.create(**request).choices[0]
    (call,) = list[Any](whole.message.tool_calls or ())
    assert whole.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**request, stream=True)]
    begun, *further = [one for piece in pieces for one in list[Any](piece.delta.tool_calls or ())]
    assert begun.function.name == call.function.name and pieces[-1].finish_reason == "tool_calls"
    assert "".join(one.function.arguments for one in (begun, *further)) == call.function.arguments


def test_what_a_model_refuses_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: got -1.0") as caught:
        client.completions.create(model="generate", prompt=PROMPT, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="row 70: input: .*; at most 512") as long:
        client.embeddings.create(model="encode", input=["a"] * 70 + ["a " * 600])
    assert long.value.param == "input"
    with pytest.raises(openai.RateLimitError, match="latency_ms"):
        client.embeddings.create(model="encode", input="a", extra_body={"latency_ms": 1e-6})


def test_a_client_that_goes_away_is_cancelled_in_triton(url: str, triton: TritonServer) -> None:
    def cancelled() -> float:
        found = metrics.scrape(triton.metrics_url)
        wanted = {("model", "generate"), ("code", "CANCELLED")}
        return sum(
            value for (name, labels), value in found.items() if name == "shapeshift_requests_total" and wanted <= labels
        )

    before = cancelled()
    body = {"model": "generate", "prompt": PROMPT, "max_tokens": 480, "n": 16, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: cancelled() > before, timeout_s=30, pause_s=0.2)


def test_curl(url: str) -> None:
    body = json.dumps({"model": "encode", "input": "a"})
    done = subprocess.run(
        ["curl", "-sf", f"{url}/v1/embeddings", "-d", body], capture_output=True, check=True, timeout=60
    )
    assert len(json.loads(done.stdout)["data"][0]["embedding"]) == 384


def test_a_model_is_ready_exactly_while_it_can_answer(client: openai.OpenAI, triton: TritonServer) -> None:
    """KServe's readiness. The gateway's answer while there is none says when to come back."""
    model = f"http://{triton.http_url}/v2/models/encode"
    text = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}

    def is_ready() -> bool:
        return HTTP.get(f"{model}/ready").status_code == 200

    def answers() -> bool:
        return HTTP.post(f"{model}/infer", json={"inputs": [text]}).status_code == 200

    assert is_ready() and answers()
    with ModelControl(triton.grpc_url, keys.read_key(triton.settings.key_file)) as control:
        control.unload("encode")
        loading = threading.Thread(target=control.load, args=("encode",))
        try:
            assert not is_ready() and not answers()
            with pytest.raises(openai.APIStatusError) as gone:
                client.embeddings.create(model="encode", input="a")
            assert gone.value.status_code == 503 and gone.value.response.headers["retry-after"]
        finally:
            loading.start()
        wait_for(is_ready, timeout_s=120, pause_s=0.01)
        assert answers(), "the first request after it was ready"
        loading.join(120)
    # The gateway looks once a second; a client that comes back when it says so gets its answer.
    assert client.with_options(max_retries=30).embeddings.create(model="encode", input="a").data


def test_metrics_of_triton_are_passed_on(url: str) -> None:
    wait_for(lambda: "shapeshift_heartbeat_total" in HTTP.get(f"{url}/metrics").text, pause_s=0.2)


def test_many_streams_at_once(url: str) -> None:
    async def all_of(count: int) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="generate", prompt=PROMPT, max_tokens=8, seed=number % 5, stream=True
                )
                return "".join([piece.choices[0].text async for piece in stream])

            return list(await asyncio.gather(*(one(number) for number in range(count))))

    before = time.monotonic()
    texts = asyncio.run(all_of(100))
    assert len(set(texts)) <= 5 and all(texts), f"after {time.monotonic() - before:.0f} s"
