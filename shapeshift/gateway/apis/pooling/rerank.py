"""POST /v1/rerank and /v2/rerank, as Jina, Cohere and vLLM have them, and /rerank, which also has TEI's shape."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field

from shapeshift.gateway.apis.fields import ApiRequest, Int32, ModelRequest, TeiRequest, bounded, has_field, not_served
from shapeshift.gateway.apis.pooling.classify import order
from shapeshift.gateway.apis.pooling.scores import KINDS, ScoreType, score
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.serving.description import RERANKING

router = APIRouter(route_class=BodyRoute, tags=["rerank"])


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
    score_type: ScoreType | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
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
    target = await context.gateway.catalogue.find(body.model, KINDS)
    texts = body.texts()
    parameters = body.request_parameters("truncate", "truncate_prompt_tokens")
    fields = "query", "documents"
    scores, tokens = await score(context, target, [body.query], texts, parameters, fields, body.score_type)
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
    target = await context.gateway.catalogue.only(body.model, KINDS if body.model else (RERANKING,))
    parameters, fields = body.request_parameters(), ("query", "texts")
    scores, _ = await score(context, target, [body.query], body.texts, parameters, fields, raw=body.raw_scores)
    texts = body.texts if body.return_text else None
    return [
        {"index": place, "score": float(scores[place]), **({"text": texts[place]} if texts else {})}
        for place in order(scores)[: body.top_n]
    ]
