"""The bodies of requests, held against what OpenAI publishes and the parameter types of its own client."""

from __future__ import annotations

import json
from typing import get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from pydantic import BaseModel

from shapeshift.gateway.apis.generation.chat import ChatRequest
from shapeshift.gateway.apis.generation.completions import CompletionRequest
from shapeshift.gateway.apis.pooling.embeddings import EmbeddingRequest
from tests.gateway import openai_fields

PARAMS = [(CompletionRequest, CompletionParams), (ChatRequest, ChatParams), (EmbeddingRequest, EmbeddingCreateParams)]
# What OpenAI takes and the gateway does not: the continuation of no prompt.
NARROWER = {"/completions": {"prompt": ["null"]}}
PUBLISHED: dict[str, type[BaseModel]] = dict(
    zip(openai_fields.ROUTES, (ChatRequest, CompletionRequest, EmbeddingRequest), strict=True)
)


@pytest.mark.parametrize(("own", "theirs"), PARAMS)
def test_every_field_of_openais_is_known(own: type[BaseModel], theirs: type) -> None:
    assert get_type_hints(theirs).keys() - own.model_fields.keys() == set()


@pytest.mark.parametrize("route", openai_fields.ROUTES)
def test_what_openai_publishes_is_known_with_its_types(route: str) -> None:
    published = json.loads(openai_fields.EXTRACT.read_text())[route]
    assert len(published) > 4
    schema = PUBLISHED[route].model_json_schema()
    own = dict(openai_fields.fields(schema, schema))
    # A field that is not served takes any type, so that its refusal can say so.
    narrower = {
        name: sorted({*types} - {*own.get(name, ())} - ({"integer"} if "number" in own.get(name, ()) else set()))
        for name, types in published.items()
    }
    assert {name: types for name, types in narrower.items() if types} == NARROWER.get(route, {})
