"""POST /v1/rerank and /v2/rerank, as Jina, Cohere and vLLM have them, and /rerank, which also has TEI's shape."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field

from shapeshift.gateway.apis.fields import ApiRequest, ModelRequest, TeiRequest, bounded, has_field, not_served
from shapeshift.gateway.apis.pooling.classify import activated, order
from shapeshift.gateway.apis.pooling.embeddings import OUTPUT, of_length_1
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.text_rows import infer_rows, require_output, text_column
from shapeshift.serving.description import EMBEDDING, RERANKING

router = APIRouter(route_class=BodyRoute, tags=["rerank"])

_KINDS = (RERANKING, EMBEDDING)


class Document(ApiRequest):
    """A document as an object."""

    text: str


class RerankRequest(ModelRequest):
    """top_n: documents in the answer, the best ones; None: all."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "query", "TEXT_PAIR": "documents"}

    query: str = Field(min_length=1)
    documents: Annotated[list[str | Document], bounded(1)] = Field(
        description="a list of 1 to 2048 texts or objects with a text"
    )
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    max_tokens_per_doc: Annotated[int | None, not_served()] = None
    priority: Annotated[int | None, not_served(0)] = None

    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class TeiRerankRequest(TeiRequest):
    """TEI's body of POST /rerank. top_n, which TEI leaves unread: texts in the answer, the best ones; None: all."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "query", "TEXT_PAIR": "texts"}

    query: str = Field(min_length=1)
    texts: Annotated[list[str], bounded(1)]
    raw_scores: bool = False
    return_text: bool = False
    top_n: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def class_of(cls, body: bytes) -> type[ApiRequest]:
        """A JSON object with `documents` is not TEI's."""
        return RerankRequest if has_field(body, "documents") else cls


@router.post("/v1/rerank")
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(body: RerankRequest, context: Context) -> dict[str, Any]:
    """The documents with their scores, the best first."""
    target = await context.gateway.catalogue.find(body.model, _KINDS)
    texts = body.texts()
    scores, tokens = await _scores(context, target, body.query, texts, body.request_parameters("truncate"))
    results: list[dict[str, Any]] = []
    for place in order(scores)[: body.top_n]:
        results.append({"index": place, "relevance_score": float(scores[place])})
        # vLLM and Jina have the documents in the answer unless told otherwise, Cohere has none.
        if body.return_documents is not False:
            results[-1]["document"] = {"text": texts[place]}
    usage = {"total_tokens": tokens}
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "usage": usage, "results": results}


@router.post("/rerank")
async def rerank_in_either_shape(body: TeiRerankRequest | RerankRequest, context: Context) -> object:
    """The texts with their scores as text-embeddings-inference has them; a body with `documents`: as /v1/rerank."""
    if isinstance(body, RerankRequest):
        return await rerank(body, context)
    target = await context.gateway.catalogue.only(body.model, _KINDS if body.model else (RERANKING,))
    scores, _ = await _scores(
        context, target, body.query, body.texts, body.request_parameters(), "texts", body.raw_scores
    )
    texts = body.texts if body.return_text else None
    return [
        {"index": place, "score": float(scores[place]), **({"text": texts[place]} if texts else {})}
        for place in order(scores)[: body.top_n]
    ]


async def _scores(
    context: Context,
    target: Target,
    query: str,
    texts: Sequence[str],
    parameters: Mapping[str, Any],
    param: str = "documents",
    raw: bool = False,
) -> tuple[NDArray[np.float64], int]:
    """A score [n] for each text: a classifier's of the pair, or the cosine of two embeddings.

    raw: whether a classifier's is its logit. Also how many tokens the model read. Raises ApiError, and as `infer_rows`.
    """
    if target.front.kind == EMBEDDING:
        column = np.concatenate([text_column([query], "query"), text_column(texts, param)])
        outputs, tokens = await infer_rows(context, target, {"TEXT": column}, [OUTPUT], parameters)
        vectors = of_length_1(outputs[OUTPUT].astype(np.float64))
        return vectors[1:] @ vectors[0], tokens
    require_output(target, "LOGITS")
    columns = {"TEXT": text_column([query] * len(texts), "query"), "TEXT_PAIR": text_column(texts, param)}
    outputs, tokens = await infer_rows(context, target, columns, ["LOGITS"], parameters)
    logits = outputs["LOGITS"] if raw else activated(target, outputs["LOGITS"])
    return logits[:, 0].astype(np.float64), tokens
