"""POST /v1/embeddings, /v2/embed of Cohere, and /embed of text-embeddings-inference (TEI)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field

from shapeshift.gateway.apis.fields import (
    INPUTS,
    TEXTS,
    Inputs,
    Int32,
    ModelRequest,
    TeiRequest,
    Texts,
    bounded,
    listed,
    not_served,
)
from shapeshift.gateway.apis.pooling.images import rows_of, vectors_of
from shapeshift.gateway.apis.pooling.vectors import VectorType, in_base64, of_length_1, of_type, shortened
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.text_rows import infer_texts
from shapeshift.serving.description import EMBEDDING, IMAGE_EMBEDDING

router = APIRouter(route_class=BodyRoute, tags=["embeddings"])

Types = Annotated[list[VectorType], bounded(1, 6)]
# Names of prompts for each of Cohere's purposes, the likeliest first.
_PROMPTS: Mapping[str, Sequence[str]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class EmbeddingRequest(ModelRequest):
    """OpenAI's, with Cohere's embedding_types, Jina's objects and infinity's modality.

    The last three are request parameters of the technique `polymorph`. modality: what texts in `input` are.
    """

    # A front calls the pixels of a decoded IMAGE `image`.
    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("TEXT", "INPUT_IDS", "IMAGE", "image"), "input")

    input: Inputs = Field(description=INPUTS)
    modality: Literal["text", "image"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    embedding_types: Types | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Int32 | None = None


class EmbedRequest(TeiRequest):
    """TEI's. normalize: false leaves the vectors as the model makes them, of length 1 for some."""

    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("input", "TEXT", "INPUT_IDS"), "inputs")

    inputs: Texts = Field(description=TEXTS)
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class CohereEmbedRequest(ModelRequest):
    """Cohere's, of texts. input_type: the prompt of this purpose, where the model has one."""

    made_of: ClassVar[Mapping[str, str]] = {"input": "texts", "TEXT": "texts"}

    texts: Annotated[list[str], bounded(1)]
    input_type: Literal["search_query", "search_document", "classification", "clustering"] | None = None
    embedding_types: Types = ["float"]
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    truncate: Annotated[Literal["NONE", "START", "END"], not_served("NONE", "END")] = "END"
    images: Annotated[Any, not_served()] = None
    inputs: Annotated[Any, not_served()] = None
    priority: Annotated[int | None, not_served(0)] = None

    def field_of(self, name: str) -> str:
        """As of every request; another name of the same parameter."""
        return {"truncate_prompt_tokens": "max_tokens"}.get(name, super().field_of(name))


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, context: Context) -> dict[str, Any]:
    """Vectors of texts and images, as lists of numbers or in base64 (float32, little-endian), or of `embedding_types`.

    An image has the `gamma` of its vector beside it.
    """
    target = await context.gateway.catalogue.find(body.model, (EMBEDDING, IMAGE_EMBEDDING))
    parameters = body.request_parameters("prompt_name", "truncate", "truncate_prompt_tokens")
    rows = rows_of(target, body.input, body.modality)
    gammas: Mapping[int, int] = {}
    if rows is None:
        vectors, tokens = await _embed(context, target, listed(cast("Texts", body.input)), parameters)
    else:
        mixed = await vectors_of(context, target, rows, body.request_parameters(), parameters)
        vectors, tokens, gammas = mixed.vectors, mixed.tokens, mixed.gammas
    vectors = shortened(target, vectors, body.dimensions)
    in_text = body.encoding_format == "base64"
    packed: Mapping[str, Any] = {"float": in_base64(vectors) if in_text else vectors}
    if body.embedding_types is not None:
        packed = {kind: of_type(vectors, kind, "embedding_types") for kind in body.embedding_types}
        packed = {kind: in_base64(rows) if in_text and kind != "base64" else rows for kind, rows in packed.items()}
    columns = [*packed.values()]
    by_type = (dict(zip(packed, row, strict=True)) for row in zip(*columns, strict=True))
    packed_rows = columns[0] if len(columns) == 1 else by_type
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": place, "embedding": row} for place, row in enumerate(packed_rows)
    ]
    for place, gamma in gammas.items():
        data[place]["gamma"] = gamma
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


@router.post("/v2/embed")
async def cohere_embed(body: CohereEmbedRequest, context: Context) -> dict[str, Any]:
    """Vectors of each type, as Cohere has them."""
    target = await context.gateway.catalogue.find(body.model, (EMBEDDING,))
    parameters = body.request_parameters()
    prompts = target.front.description.get("prompts") or {}
    name = next((one for one in _PROMPTS.get(body.input_type or "", ()) if one in prompts), None)
    parameters |= {"truncate": body.truncate == "END"} | ({} if name is None else {"prompt_name": name})
    parameters |= {} if body.max_tokens is None else {"truncate_prompt_tokens": body.max_tokens}
    vectors, tokens = await _embed(context, target, body.texts, parameters)
    vectors = shortened(target, vectors, body.output_dimension, "output_dimension")
    return {
        "id": f"embed-{uuid.uuid4().hex}",
        "embeddings": {kind: of_type(vectors, kind, "embedding_types") for kind in body.embedding_types},
        "texts": body.texts,
        "response_type": "embeddings_by_type",
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
    }


@router.post("/embed")
async def tei_embed(body: EmbedRequest, context: Context) -> list[NDArray[Any]]:
    """A vector for each input."""
    target = await context.gateway.catalogue.only(body.model, (EMBEDDING,))
    vectors, _ = await _embed(context, target, listed(body.inputs), body.request_parameters("prompt_name"))
    vectors = shortened(target, vectors, body.dimensions)
    # TEI's default; nothing changes where the model does it already.
    return list(vectors if body.normalize is False else of_length_1(vectors))


async def _embed(
    context: Context,
    target: Target,
    inputs: Sequence[str] | Sequence[Sequence[int]],
    parameters: Mapping[str, Any],
) -> tuple[NDArray[np.float32], int]:
    """The vectors [n, width], and how many tokens the model read. Raises as `infer_texts`."""
    outputs, tokens = await infer_texts(context, target, inputs, ["EMBEDDING"], parameters)
    return outputs["EMBEDDING"], tokens
