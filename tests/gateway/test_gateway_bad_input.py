"""What every route refuses: bodies, keys, and too much of anything."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from pydantic import BaseModel, ValidationError

from shapeshift import errors
from shapeshift.errors import InvalidInputError, ModelError
from shapeshift.fused_decode.sampling_params import sampling_checks
from shapeshift.gateway.apis.generation.chat import ChatRequest
from shapeshift.gateway.apis.generation.completions import CompletionRequest
from shapeshift.gateway.apis.pooling.classify import PredictRequest
from shapeshift.gateway.apis.pooling.embeddings import EmbeddingRequest
from shapeshift.gateway.apis.pooling.rerank import RerankRequest
from shapeshift.gateway.errors import api_error
from shapeshift.gateway.settings import GatewaySettings
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FakeTriton
from tests.waiting import wait_for

EMBED = {"model": "encode", "input": "a"}


def post(url: str, content: bytes, **headers: str) -> Any:
    answer = HTTP.post(f"{url}/v1/embeddings", content=content, headers=headers)
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[" * 10_000 + b"]" * 10_000, "invalid_json"),
        (b'{"model":"encode","input":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "invalid_json"),
        (b'{"model":"encode","input":"\\ud800"}', "invalid_json"),
        (b'{"model":"encode","input":"\xff"}', "invalid_json"),
        (b"[1]", "invalid_type"),
        (b'"text"', "invalid_type"),
        (b'{"model":"encode","input":"a","latency_ms":NaN}', "invalid_value"),
        (b'{"model":"encode","input":[' + b"9" * 5000 + b"]}", "invalid_json"),
        (b'{"model":"","input":"a"}', "invalid_value"),
        (b'{"model":null,"input":"a"}', "invalid_value"),
    ],
)
def test_bodies_that_are_no_request(url: str, content: bytes, code: str) -> None:
    assert post(url, content) == (400, code)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (EmbeddingRequest, {"input": [1] * 20_000 + ["a"]}),
        (EmbeddingRequest, {"input": ["a"] * 20_000}),
        (EmbeddingRequest, {"input": [["a"]] * 2000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 20_000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(20_000)), "x")}),
        (ChatRequest, {"messages": [1] * 20_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 20_000}]}),
        (RerankRequest, {"query": "a", "documents": [1] * 2000}),
        (PredictRequest, {"inputs": [[1]] * 2000}),
    ],
)
def test_the_first_wrong_item_of_a_list_ends_its_check(model: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps({"model": "a", **fields}))
    assert caught.value.error_count() <= 2


def test_a_refusal_is_short(url: str) -> None:
    large = ["a" * 1000] * 20_000
    for fields in ({"input": {"a": large}}, {"x": large}, {"x" * 100_000: 1}, dict.fromkeys(map(str, range(20_000)))):
        answer = HTTP.post(f"{url}/v1/embeddings", json={**EMBED, **fields})
        assert answer.status_code == 400 and len(answer.content) < 1000


def packed(url: str, body: bytes, encoding: str = "gzip") -> Any:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return HTTP.post(f"{url}/v1/embeddings", content=body, headers=headers)


def test_a_body_in_gzip_is_read(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton(), max_body_bytes=1000)
    text = json.dumps(EMBED).encode()
    plain = packed(url, text, "identity")
    assert plain.status_code == 200 and packed(url, gzip.compress(text)).json() == plain.json()
    longest = text + b" " * (1000 - len(text))
    assert packed(url, gzip.compress(longest)).status_code == 200
    whole = gzip.compress(text)
    refused = {
        (413, "body_too_large"): [gzip.compress(longest + b" "), gzip.compress(b" " * 500_000)],
        (400, "invalid_encoding"): [text, whole[:-1], whole[:20], whole + b"x", whole * 2, b""],
        (400, "invalid_json"): [gzip.compress(b"")],
    }
    for expected, bodies in refused.items():
        for body in bodies:
            answer = packed(url, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == expected, body[:20]


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip"])
def test_another_encoding_is_named(url: str, encoding: str) -> None:
    answer = packed(url, json.dumps(EMBED).encode(), encoding)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip")
    assert encoding in answer.json()["error"]["message"]


def test_a_body_of_very_many_fields_is_refused_unread(url: str) -> None:
    body = b'{"model":"encode","input":"a","x":1' + b',"y":1' * (1 << 19) + b"}"
    answer = HTTP.post(f"{url}/v1/embeddings", content=body)
    assert answer.status_code == 400 and "at most 524288 fields" in answer.json()["error"]["message"]


LARGE: dict[str, Any] = {"type": "object", "maxProperties": 10**25}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": LARGE}}, "structured_outputs"),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": LARGE}}},
            "response_format.json_schema.schema",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": LARGE}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
        ("/v1/classify", {"input": "a", "level": 10**25}, "level"),
        ("/v1/load_lora_adapter", {"lora_name": "a\0", "lora_path": "a"}, "lora_name"),
        ("/v1/unload_lora_adapter", {"lora_name": "a\n"}, "lora_name"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(url: str, route: str, body: dict[str, Any], param: str) -> None:
    answer = HTTP.post(f"{url}{route}", json={"model": "generate", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value"), error


def test_a_body_that_is_too_long(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton(), max_body_bytes=1000)
    assert post(url, json.dumps({**EMBED, "input": "a" * 1000}).encode()) == (413, "body_too_large")

    def pieces() -> Any:
        yield from [b"x" * 100] * 20

    answer = HTTP.post(f"{url}/v1/embeddings", content=pieces())
    assert answer.status_code == 413
    assert HTTP.post(f"{url}/v1/embeddings", json=EMBED).status_code == 200


def test_half_a_body(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton(), body_timeout_s=0.2)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.putrequest("POST", "/v1/embeddings")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b'{"model":')
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "timeout")


def test_too_many_requests_at_once(start_gateway: Callable[..., str]) -> None:
    triton = FakeTriton()
    triton.pause_s = 1.0
    url = start_gateway(triton, max_requests=2)
    answers: list[int] = []

    def ask() -> None:
        answers.append(HTTP.post(f"{url}/v1/embeddings", json=EMBED).status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(triton.calls) == 2)
    refused = HTTP.post(f"{url}/v1/embeddings", json=EMBED)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert HTTP.get(f"{url}/health").status_code == 200
    for thread in threads:
        thread.join()
    assert answers == [200, 200]
    assert HTTP.post(f"{url}/v1/embeddings", json=EMBED).status_code == 200


def test_urls_and_methods_that_there_are_not(url: str) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/embeddings", 405)):
        answer = HTTP.request(method, f"{url}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "unknown_url")


def test_an_invalid_request_id_is_replaced(url: str) -> None:
    answer = HTTP.get(f"{url}/v1/models", headers={"X-Request-Id": "a b"})
    assert answer.headers["x-request-id"] not in ("a b", "")


# Errors of the models.


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidInputError("x", 1, "2"), 400, "invalid_value"),
        (errors.NotFoundError("x"), 404, "model_not_found"),
        (errors.OverloadedError("x"), 429, "overloaded"),
        (errors.TimedOutError("x"), 504, "timeout"),
        (errors.ModelGoneError("x"), 503, "unavailable"),
        (errors.ModelDiedError("x"), 503, "unavailable"),
        (errors.UnsupportedError("x"), 501, "unsupported"),
        (errors.CancelledRequestError("x"), 499, "cancelled"),
        (errors.EngineError("x"), 500, "internal_error"),
        (ModelError("temperature: got 'x'; y", "INVALID_ARG"), 400, "invalid_value"),
        (ModelError("x", "NOT_FOUND"), 404, "model_not_found"),
        (ModelError("x", "UNAVAILABLE"), 429, "overloaded"),
        (ModelError("x", "UNSUPPORTED"), 501, "unsupported"),
        (ModelError("x", "CANCELLED"), 499, "cancelled"),
        (ModelError("x", "INTERNAL"), 500, "internal_error"),
        (RuntimeError("x"), 500, "internal_error"),
    ],
)
def test_every_error_has_a_status(error: Exception, status: int, code: str) -> None:
    found = api_error(error)
    assert (found.status, found.code) == (status, code)
    assert found.headers.get("retry-after") == ("1" if status in (429, 503) else None)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("temperature: got -1; 0 to 1e+30", "temperature"),
        ("sampling_parameters logit_bias: got 1; y", "logit_bias"),
        ("parameter latency_ms: got 0; above 0", "latency_ms"),
        ("nothing is named", None),
    ],
)
def test_the_param_is_the_requests_own(text: str, param: str | None) -> None:
    assert api_error(ModelError(text, "INVALID_ARG")).param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"999": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 200}),
        ("logit_bias", dict.fromkeys(map(str, range(2000)), 1)),
        ("stop", [""]),
        ("stop", ["a", "b" * 1000]),
        ("stop", ["a"] * 99),
        ("stop_token_ids", [1000]),
        ("bad_words", [""]),
        ("structured_outputs", {"regex": 5}),
        ("structured_outputs", {"choice": [""]}),
    ],
)
def test_the_param_is_named_where_a_part_of_it_is_wrong(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as refused:
        sampling_checks(vocab_size=100)[name](name, value)
    found = api_error(refused.value)
    assert (found.param, found.message) == (name, str(refused.value))


CHAT = {"model": "generate", "messages": [{"role": "user", "content": "a"}]}
WANTED = {"structured_outputs": {"json": True}}


@pytest.mark.parametrize(
    ("route", "body", "named", "field"),
    [
        ("/v1/chat/completions", CHAT, "text_input", "messages"),
        ("/v1/chat/completions", {**CHAT, **WANTED}, "structured_outputs", "structured_outputs"),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "response_format",
        ),
        ("/v1/completions", {"model": "generate", "prompt": [1]}, "input_ids", "prompt"),
        ("/v1/embeddings", EMBED, "TEXT", "input"),
        ("/v1/classify", {"model": "classify_text", "input": "a"}, "TEXT", "input"),
        ("/v1/rerank", {"model": "cross", "query": "a", "documents": ["a"]}, "TEXT", "query"),
        ("/v1/rerank", {"model": "cross", "query": "a", "documents": ["a"]}, "TEXT_PAIR", "documents"),
        ("/rerank", {"model": "cross", "query": "a", "texts": ["a"]}, "TEXT_PAIR", "texts"),
        ("/embed", {"inputs": "a"}, "TEXT", "inputs"),
        ("/predict", {"model": "classify_text", "inputs": "a"}, "TEXT", "inputs"),
    ],
)
def test_a_models_error_names_the_field_of_the_request(
    url: str, triton: FakeTriton, route: str, body: dict[str, Any], named: str, field: str
) -> None:
    triton.failure = ModelError(f"row 0: {named}: got '600 tokens'; at most 512", "INVALID_ARG")
    error = HTTP.post(f"{url}{route}", json=body).json()["error"]
    assert error["message"] == f"row 0: {field}: got '600 tokens'; at most 512"
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_openais_error_classes(client: openai.OpenAI, triton: FakeTriton) -> None:
    for error, kind in (
        (ModelError("full", "UNAVAILABLE"), openai.RateLimitError),
        (errors.EngineError("broken"), openai.InternalServerError),
        (errors.TimedOutError("late"), openai.InternalServerError),
    ):
        triton.failure = error
        with pytest.raises(kind, match=str(error)):
            client.embeddings.create(model="encode", input="a")


def test_an_unexpected_exception_is_logged_and_not_shown(
    start_gateway: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    triton = FakeTriton()
    url = start_gateway(triton)
    triton.failure = RuntimeError("a secret")
    answer = HTTP.post(f"{url}/v1/embeddings", json=EMBED, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"] == "mine" and "secret" not in answer.text
    assert "a secret" in caplog.text and "request id mine" in caplog.text
    assert 'answers_total{status="500"} 1' in HTTP.get(f"{url}/metrics").text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("triton", ()),
        ("triton", ("nowhere",)),
        ("port", 0),
        ("max_requests", 0),
        ("request_timeout_s", 0.0),
        ("host", "0.0.0.0"),
        ("cors_origins", ("example.org",)),
        ("cors_origins", ("https://example.org/",)),
    ],
)
def test_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        GatewaySettings(**{field: value})
    assert GatewaySettings(host="0.0.0.0", api_keys=Path("keys")).host == "0.0.0.0"


def test_each_request_has_a_line_where_its_log_is_on(
    start_gateway: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    url = start_gateway(FakeTriton())
    log = "shapeshift.gateway.requests"

    def paths() -> list[str]:
        return [record.fields["path"] for record in caplog.records if record.name == log]  # type: ignore[attr-defined]

    HTTP.get(f"{url}/health")
    caplog.set_level(logging.INFO, log)
    HTTP.get(f"{url}/nobody", headers={"X-Request-Id": "mine"})
    HTTP.post(f"{url}/v1/embeddings", json=EMBED)
    wait_for(lambda: len(paths()) == 2)
    assert paths() == ["/nobody", "/v1/embeddings"]
    first = next(record for record in caplog.records if record.name == log)
    assert first.fields["ms"] > 0 and first.getMessage().startswith("GET /nobody 404 ")  # type: ignore[attr-defined]
    assert first.getMessage().endswith(" ms, mine")
