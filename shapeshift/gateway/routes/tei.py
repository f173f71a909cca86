"""POST /embed and /predict: routes of text-embeddings-inference. Its /rerank is in `rerank`."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from shapeshift.gateway.http import bodies
from shapeshift.gateway.inference.classification import classify
from shapeshift.gateway.routes.embeddings import cut, embed
from shapeshift.gateway.routes.rerank import order
from shapeshift.gateway.schemas.completions import listed
from shapeshift.gateway.schemas.tei import EmbedRequest, PredictRequest
from shapeshift.gateway.state import answer, connected, gateway_of, id_of
from shapeshift.serving.description import EMBEDDING, TEXT_CLASSIFICATION

router = APIRouter(tags=["text-embeddings-inference"])


@router.post("/embed", openapi_extra=bodies.described(EmbedRequest))
async def tei_embed(request: Request) -> Response:
    """A vector for each input."""
    asked = await bodies.read(request, EmbedRequest)
    gateway = gateway_of(request)
    target = await connected(request, gateway.catalogue.only(asked.model, (EMBEDDING,)))
    parameters = asked.parameters() | ({} if asked.prompt_name is None else {"prompt_name": asked.prompt_name})
    vectors, _ = await connected(request, embed(gateway, target, listed(asked.inputs), parameters, id_of(request)))
    vectors = cut(target, vectors, asked.dimensions)
    if asked.normalize is not False:
        # TEI's default; nothing changes where the model does it already.
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return answer(list(vectors))


@router.post("/predict", openapi_extra=bodies.described(PredictRequest))
async def tei_predict(request: Request) -> Response:
    """All labels with their scores, the most likely first; a list of such lists for several inputs."""
    asked = await bodies.read(request, PredictRequest)
    gateway = gateway_of(request)
    target = await connected(request, gateway.catalogue.only(asked.model, (TEXT_CLASSIFICATION,)))
    rows, several = asked.rows()
    work = classify(gateway, target, rows, asked.parameters(), id_of(request), asked.raw_scores)
    found = await connected(request, work)
    named = [
        [{"label": found.labels[place], "score": float(row[place])} for place in order(row)] for row in found.scores
    ]
    return answer(named if several else named[0])
