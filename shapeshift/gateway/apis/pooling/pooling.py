"""POST /v1/pooling of vLLM: whatever a model computes of texts; /embed_sparse and /embed_all of TEI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field

from shapeshift.gateway.apis.fields import TEXTS, Int32, ModelRequest, TeiRequest, Texts, listed
from shapeshift.gateway.apis.pooling.classify import activated, list_of
from shapeshift.gateway.apis.pooling.vectors import in_base64, require_type, shortened, softmax, terms, token_vectors
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.errors import invalid
from shapeshift.gateway.text_rows import infer_texts
from shapeshift.serving.description import (
    EMBEDDING,
    RERANKING,
    SPARSE_EMBEDDING,
    TEXT_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    TOKEN_EMBEDDING,
)
from shapeshift.serving.text_inputs import NUM_TOKENS
from shapeshift.triton.async_client import Tensors

router = APIRouter(route_class=BodyRoute, tags=["embeddings"])

_KINDS = (EMBEDDING, TOKEN_EMBEDDING, TEXT_CLASSIFICATION, RERANKING, TOKEN_CLASSIFICATION)
# By vLLM's task, in the order in which one is taken where none is named.
_OUTPUTS: Mapping[str, Sequence[str]] = {
    "embed": ("EMBEDDING",),
    "token_embed": ("TOKEN_EMBEDDING",),
    "classify": ("LOGITS",),
    "token_classify": ("TOKEN_LOGITS", NUM_TOKENS.name),
}


class PoolingRequest(ModelRequest):
    """vLLM's. use_activation: false leaves logits as they are."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "input", "INPUT_IDS": "input"}

    input: Texts = Field(description=TEXTS)
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    use_activation: bool | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Int32 | None = None


class TextsRequest(TeiRequest):
    """TEI's body of POST /embed_sparse and /embed_all."""

    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("input", "TEXT", "INPUT_IDS"), "inputs")

    inputs: Texts = Field(description=TEXTS)
    prompt_name: str | None = None


@router.post("/v1/pooling")
@router.post("/pooling", include_in_schema=False)
async def create_pooling(body: PoolingRequest, context: Context) -> dict[str, Any]:
    """The vectors or scores of each text, or of each of its tokens."""
    target = await context.gateway.catalogue.find(body.model, _KINDS)
    offered = {*target.front.names("outputs")}
    task: str = body.task or next((name for name, outputs in _OUTPUTS.items() if {*outputs} <= offered), "embed")
    require_type(target, task, "task", _OUTPUTS)
    if body.dimensions is not None and task != "embed":
        raise invalid("dimensions", body.dimensions, "with the task embed only")
    parameters = body.request_parameters("prompt_name", "truncate", "truncate_prompt_tokens")
    outputs, tokens = await infer_texts(context, target, listed(body.input), _OUTPUTS[task], parameters)
    rows: Iterable[NDArray[Any]]
    if task == "embed":
        rows = shortened(target, outputs["EMBEDDING"], body.dimensions)
    elif task == "token_embed":
        rows = token_vectors(outputs["TOKEN_EMBEDDING"])
    elif task == "classify":
        logits = outputs["LOGITS"]
        rows = logits if body.use_activation is False else activated(target, logits).astype(np.float32)
    else:
        rows = _of_tokens(outputs, body.use_activation is not False)
    data = in_base64(rows) if body.encoding_format == "base64" else rows
    listed_rows = [{"index": place, "object": "pooling", "data": row} for place, row in enumerate(data)]
    return list_of("pool", body.model, listed_rows, tokens)


@router.post("/embed_sparse")
async def tei_embed_sparse(body: TextsRequest, context: Context) -> list[list[dict[str, Any]]]:
    """Of each input the ids of the vocabulary that have a weight, and their weights."""
    target = await context.gateway.catalogue.only(body.model, (SPARSE_EMBEDDING,))
    names, parameters = ("SPARSE_INDICES", "SPARSE_VALUES"), body.request_parameters("prompt_name")
    outputs, _ = await infer_texts(context, target, listed(body.inputs), names, parameters)
    rows = terms(outputs["SPARSE_INDICES"], outputs["SPARSE_VALUES"])
    return [[{"index": index, "value": value} for index, value in row.items()] for row in rows]


@router.post("/embed_all")
async def tei_embed_all(body: TextsRequest, context: Context) -> list[NDArray[Any]]:
    """Of each input the vectors of its tokens."""
    target = await context.gateway.catalogue.only(body.model, (TOKEN_EMBEDDING,))
    name, parameters = "TOKEN_EMBEDDING", body.request_parameters("prompt_name")
    outputs, _ = await infer_texts(context, target, listed(body.inputs), [name], parameters)
    return list(token_vectors(outputs[name]))


def _of_tokens(outputs: Tensors, activate: bool) -> list[NDArray[np.float32]]:
    lengths = outputs[NUM_TOKENS.name].reshape(-1).tolist()
    rows = [row[:length] for row, length in zip(outputs["TOKEN_LOGITS"], lengths, strict=True)]
    return [softmax(row.astype(np.float64)).astype(np.float32) for row in rows] if activate else rows
