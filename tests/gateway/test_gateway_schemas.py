"""The bodies of requests, held against the parameter types of OpenAI's own client, and against random JSON."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from pydantic import BaseModel

from shapeshift.gateway.app import _BODIES
from shapeshift.gateway.schemas.chat import ChatRequest
from shapeshift.gateway.schemas.completions import CompletionRequest
from shapeshift.gateway.schemas.embeddings import EmbeddingRequest

PARAMS = [(CompletionRequest, CompletionParams), (ChatRequest, ChatParams), (EmbeddingRequest, EmbeddingCreateParams)]


@pytest.mark.parametrize(("own", "theirs"), PARAMS)
def test_every_field_of_openais_is_known(own: type[BaseModel], theirs: type) -> None:
    assert get_type_hints(theirs).keys() - own.model_fields.keys() == set()


@pytest.mark.parametrize("own", _BODIES, ids=lambda own: own.__name__)
def test_unknown_fields_are_refused(own: type[BaseModel]) -> None:
    assert own.model_config["extra"] == "forbid"
    assert own.model_json_schema()["additionalProperties"] is False


# Random bodies: whatever comes, the answer has OpenAI's shape and is not the server's fault.

WORDS = st.sampled_from(["generate", "encode", "cross", "classify_text", "shout", "user", "text", "json_schema", ""])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ROUTES = sorted(
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v1/classify"),
        *("/embed", "/rerank", "/predict", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    ]
)


@st.composite
def bodies(draw: Any) -> tuple[str, bytes]:
    """A route, and a body whose fields are mostly those of some request."""
    route = draw(st.sampled_from(ROUTES))
    known = sorted({name for body in _BODIES for name in body.model_fields})
    fields = draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=5), ANY, max_size=6))
    good = {
        "model": draw(WORDS),
        "prompt": "a b",
        "messages": [{"role": "user", "content": "hello"}],
        "input": "a",
        "inputs": "a",
        "query": "q",
        "documents": ["a"],
        "texts": ["a"],
        "lora_name": "x",
        "lora_path": "y",
    }
    wanted = {
        "/v1/completions": ("prompt",),
        "/v1/chat/completions": ("messages",),
        **dict.fromkeys(("/v1/embeddings", "/v1/classify"), ("input",)),
        **dict.fromkeys(("/embed", "/predict"), ("inputs",)),
        "/v1/rerank": ("query", "documents"),
        "/rerank": ("query", "texts"),
        "/v1/load_lora_adapter": ("lora_name", "lora_path"),
        "/v1/unload_lora_adapter": ("lora_name",),
    }[route]
    body = {name: good[name] for name in ("model", *wanted)} | fields
    return route, json.dumps(body).encode(errors="surrogatepass")


@pytest.fixture(scope="module")
def http() -> Any:
    with httpx2.Client(timeout=30) as client:
        yield client


def check(http: httpx2.Client, url: str, case: tuple[str, bytes]) -> None:
    route, body = case
    answer = http.post(f"{url}{route}", content=body)
    assert answer.status_code in (200, 400, 404, 501), (route, body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["message"], (route, body)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies())
def test_random_bodies(http: httpx2.Client, url: str, case: tuple[str, bytes]) -> None:
    check(http, url, case)


@pytest.mark.long
@settings(max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies())
def test_many_random_bodies(http: httpx2.Client, url: str, case: tuple[str, bytes]) -> None:
    check(http, url, case)
