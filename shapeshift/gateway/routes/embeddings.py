"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.errors import invalid
from shapeshift.gateway.http import bodies
from shapeshift.gateway.inference.text_rows import Columns, TokenRows, counted, infer_rows, num_tokens, text_column
from shapeshift.gateway.schemas.completions import listed
from shapeshift.gateway.schemas.embeddings import MOST_INPUTS, EmbeddingRequest
from shapeshift.gateway.state import Gateway, answer, connected, gateway_of, id_of
from shapeshift.serving.description import EMBEDDING

router = APIRouter(tags=["embeddings"])

OUTPUT = "EMBEDDING"
# Tokens of a row for a front that states no limit of its own.
_MOST_TOKENS = 8192


@router.post("/v1/embeddings", openapi_extra=bodies.described(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Vectors of texts, as lists of numbers or in base64 (float32, little-endian)."""
    asked = await bodies.read(request, EmbeddingRequest)
    gateway = gateway_of(request)
    target = await connected(request, gateway.catalogue.find(asked.model, (EMBEDDING,)))
    parameters = asked.parameters("prompt_name", "truncate")
    work = embed(gateway, target, listed(asked.input), parameters, id_of(request))
    vectors, tokens = await connected(request, work)
    vectors = cut(target, vectors, asked.dimensions)
    packed = [_base64(row) for row in vectors] if asked.encoding_format == "base64" else vectors
    data = [{"object": "embedding", "index": place, "embedding": row} for place, row in enumerate(packed)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return answer({"object": "list", "data": data, "model": asked.model, "usage": usage})


async def embed(
    gateway: Gateway,
    target: Target,
    inputs: Sequence[str] | Sequence[Sequence[int]],
    parameters: dict[str, Any],
    request_id: str,
) -> tuple[NDArray[np.float32], int]:
    """The vectors [n, width] of texts, or of their tokens, and how many tokens the model read.

    Raises ApiError, and as `infer_rows`.
    """
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise invalid("input", f"{len(inputs)} inputs", f"1 to {MOST_INPUTS}")
    rows: Columns | TokenRows
    if isinstance(inputs[0], str):
        rows = {"TEXT": text_column(cast("Sequence[str]", inputs))}
    else:
        rows = TokenRows(cast("Sequence[Sequence[int]]", inputs), target.front.number("max_tokens", _MOST_TOKENS))
    found = await infer_rows(gateway, target, rows, counted(target, OUTPUT), parameters, request_id)
    return found[OUTPUT], num_tokens(found)


def cut(target: Target, vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first `dimensions` numbers of each vector, of length 1, where the model was trained for that.

    Raises ApiError for a number that it does not allow.
    """
    width = vectors.shape[1]
    if dimensions is None or dimensions == width:
        return vectors
    allowed = [int(one) for one in target.front.description.get("dimensions") or []]
    if dimensions not in allowed:
        wanted = ", ".join(map(str, sorted({*allowed, width})))
        raise invalid("dimensions", dimensions, f"one of {wanted}, which {target.name} was trained for")
    first = vectors[:, :dimensions]
    scaled: NDArray[np.float32] = first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), 1e-12)
    return scaled


def _base64(row: NDArray[np.float32]) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
