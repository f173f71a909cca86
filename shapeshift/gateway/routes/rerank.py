"""POST /v1/rerank, /v2/rerank and /rerank: which documents fit a query best."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.http import bodies
from shapeshift.gateway.inference.classification import activated
from shapeshift.gateway.inference.text_rows import counted, infer_rows, num_tokens, require_outputs, text_column
from shapeshift.gateway.routes.embeddings import OUTPUT
from shapeshift.gateway.schemas.rerank import RerankRequest, names_documents
from shapeshift.gateway.schemas.tei import TeiRerankRequest
from shapeshift.gateway.state import Gateway, answer, connected, gateway_of, id_of
from shapeshift.serving.description import EMBEDDING, RERANKING

router = APIRouter(tags=["rerank"])

KINDS = (RERANKING, EMBEDDING)


@router.post("/v1/rerank", openapi_extra=bodies.described(RerankRequest))
@router.post("/v2/rerank", openapi_extra=bodies.described(RerankRequest), include_in_schema=False)
async def rerank(request: Request) -> Response:
    """The documents with their scores, the best first."""
    return await _ranked_documents(request, await bodies.read(request, RerankRequest))


@router.post("/rerank", openapi_extra=bodies.described(TeiRerankRequest, RerankRequest))
async def rerank_in_either_shape(request: Request) -> Response:
    """The texts with their scores as text-embeddings-inference has them; a body with `documents`: as /v1/rerank."""
    body = await bodies.content(request)
    if names_documents(body):
        return await _ranked_documents(request, bodies.checked(request, body, RerankRequest))
    return await _ranked_texts(request, bodies.checked(request, body, TeiRerankRequest))


async def _ranked_documents(request: Request, asked: RerankRequest) -> Response:
    gateway = gateway_of(request)
    target = await connected(request, gateway.catalogue.find(asked.model, KINDS))
    texts = asked.texts()
    work = scores(gateway, target, asked.query, texts, asked.parameters("truncate"), id_of(request))
    found, tokens = await connected(request, work)
    results: list[dict[str, Any]] = []
    for place in order(found)[: asked.top_n]:
        results.append({"index": place, "relevance_score": float(found[place])})
        # vLLM and Jina have the documents in the answer unless told otherwise, Cohere has none.
        if asked.return_documents is not False:
            results[-1]["document"] = {"text": texts[place]}
    usage = {"total_tokens": tokens}
    return answer({"id": f"rerank-{uuid.uuid4().hex}", "model": asked.model, "usage": usage, "results": results})


async def _ranked_texts(request: Request, asked: TeiRerankRequest) -> Response:
    gateway = gateway_of(request)
    target = await connected(request, gateway.catalogue.only(asked.model, KINDS if asked.model else (RERANKING,)))
    work = scores(
        gateway, target, asked.query, asked.texts, asked.parameters(), id_of(request), "texts", asked.raw_scores
    )
    found, _ = await connected(request, work)
    texts = asked.texts if asked.return_text else None
    return answer(
        [
            {"index": place, "score": float(found[place]), **({"text": texts[place]} if texts else {})}
            for place in order(found)[: asked.top_n]
        ]
    )


async def scores(
    gateway: Gateway,
    target: Target,
    query: str,
    texts: Sequence[str],
    parameters: Mapping[str, Any],
    request_id: str,
    param: str = "documents",
    raw: bool = False,
) -> tuple[NDArray[np.float64], int]:
    """A score [n] for each text: a classifier's of the pair, or the cosine of two embeddings.

    raw: whether a classifier's is its logit. Also how many tokens the model read. Raises ApiError, and as `infer_rows`.
    """
    if target.front.kind == EMBEDDING:
        column = np.concatenate([text_column([query], "query"), text_column(texts, param)])
        found = await infer_rows(gateway, target, {"TEXT": column}, counted(target, OUTPUT), parameters, request_id)
        vectors = found[OUTPUT].astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        similar: NDArray[np.float64] = vectors[1:] @ vectors[0]
        return similar, num_tokens(found)
    require_outputs(target, "LOGITS")
    columns = {"TEXT": text_column([query] * len(texts), "query"), "TEXT_PAIR": text_column(texts, param)}
    found = await infer_rows(gateway, target, columns, counted(target, "LOGITS"), parameters, request_id)
    logits = found["LOGITS"] if raw else activated(target, found["LOGITS"])
    return logits[:, 0].astype(np.float64), num_tokens(found)


def order(found: NDArray[np.float64]) -> list[int]:
    """The places of the scores, the highest first; equal ones in their order."""
    return [int(place) for place in np.argsort(-found, kind="stable")]
