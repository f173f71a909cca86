"""POST /v1/embeddings, and /embed of text-embeddings-inference (TEI)."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field

from shapeshift.gateway.apis.fields import TEXTS, ModelRequest, TeiRequest, Texts, listed
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.errors import invalid
from shapeshift.gateway.text_rows import Columns, TokenRows, infer_rows, text_column
from shapeshift.serving.description import EMBEDDING

router = APIRouter(route_class=BodyRoute, tags=["embeddings"])

OUTPUT = "EMBEDDING"
_MOST_INPUTS = 2048
# Tokens of a row for a front that states no limit of its own.
_MOST_TOKENS = 8192


class EmbeddingRequest(ModelRequest):
    """OpenAI's; prompt_name and truncate are request parameters of the technique `polymorph`."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "input", "INPUT_IDS": "input"}

    input: Texts = Field(description=TEXTS)
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    truncate: bool | None = None


class EmbedRequest(TeiRequest):
    """TEI's. normalize: false leaves the vectors as the model makes them, of length 1 for some."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "inputs", "INPUT_IDS": "inputs"}

    inputs: Texts = Field(description=TEXTS)
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, context: Context) -> dict[str, Any]:
    """Vectors of texts, as lists of numbers or in base64 (float32, little-endian)."""
    target = await context.gateway.catalogue.find(body.model, (EMBEDDING,))
    parameters = body.request_parameters("prompt_name", "truncate")
    vectors, tokens = await _embed(context, target, listed(body.input), parameters)
    vectors = _cut(target, vectors, body.dimensions)
    packed = [_base64(row) for row in vectors] if body.encoding_format == "base64" else vectors
    data = [{"object": "embedding", "index": place, "embedding": row} for place, row in enumerate(packed)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


@router.post("/embed")
async def tei_embed(body: EmbedRequest, context: Context) -> list[NDArray[Any]]:
    """A vector for each input."""
    target = await context.gateway.catalogue.only(body.model, (EMBEDDING,))
    vectors, _ = await _embed(context, target, listed(body.inputs), body.request_parameters("prompt_name"))
    vectors = _cut(target, vectors, body.dimensions)
    # TEI's default; nothing changes where the model does it already.
    return list(vectors if body.normalize is False else of_length_1(vectors))


async def _embed(
    context: Context,
    target: Target,
    inputs: Sequence[str] | Sequence[Sequence[int]],
    parameters: Mapping[str, Any],
) -> tuple[NDArray[np.float32], int]:
    """The vectors [n, width] of texts, or of their tokens, and how many tokens the model read.

    Raises ApiError, and as `infer_rows`.
    """
    if not 1 <= len(inputs) <= _MOST_INPUTS:
        raise invalid("input", f"{len(inputs)} inputs", f"1 to {_MOST_INPUTS}")
    rows: Columns | TokenRows
    if isinstance(inputs[0], str):
        rows = {"TEXT": text_column(cast("Sequence[str]", inputs))}
    else:
        rows = TokenRows(cast("Sequence[Sequence[int]]", inputs), target.front.number("max_tokens", _MOST_TOKENS))
    outputs, tokens = await infer_rows(context, target, rows, [OUTPUT], parameters)
    return outputs[OUTPUT], tokens


def _cut(target: Target, vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first `dimensions` numbers of each vector, of length 1, where the model was trained for that.

    Raises ApiError for a number that it does not allow.
    """
    width = vectors.shape[1]
    if dimensions is None or dimensions == width:
        return vectors
    allowed = [int(one) for one in target.front.description.get("dimensions") or []]
    if dimensions not in allowed:
        widths = ", ".join(map(str, sorted({*allowed, width})))
        raise invalid("dimensions", dimensions, f"one of {widths}, which {target.name} was trained for")
    return of_length_1(vectors[:, :dimensions])


def of_length_1(vectors: NDArray[Any]) -> NDArray[Any]:
    """The vectors [n, width] divided by their lengths."""
    scaled: NDArray[Any] = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return scaled


def _base64(row: NDArray[np.float32]) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
