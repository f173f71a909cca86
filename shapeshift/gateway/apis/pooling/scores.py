"""POST /v1/score of vLLM, and the scores of pairs of texts that rerank orders documents by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field

from shapeshift.gateway.apis.fields import Int32, ModelRequest, Strings
from shapeshift.gateway.apis.pooling.classify import activated, list_of
from shapeshift.gateway.apis.pooling.vectors import cosines, max_sim, require_type, shared_terms, terms, token_vectors
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.text_rows import infer_rows, text_column
from shapeshift.serving.description import EMBEDDING, RERANKING, SPARSE_EMBEDDING, TOKEN_EMBEDDING
from shapeshift.triton.async_client import Tensors

router = APIRouter(route_class=BodyRoute, tags=["rerank"])

CROSS, COSINE, LATE, SPARSE = "cross-encoder", "bi-encoder", "late-interaction", "sparse"
ScoreType = Literal["cross-encoder", "bi-encoder", "late-interaction", "sparse"]
KINDS = (RERANKING, EMBEDDING, TOKEN_EMBEDDING, SPARSE_EMBEDDING)
"""Of fronts that score; what each does unless a request says otherwise is below."""
_TYPES = {EMBEDDING: COSINE, TOKEN_EMBEDDING: LATE, SPARSE_EMBEDDING: SPARSE}
_OUTPUTS: Mapping[str, Sequence[str]] = {
    CROSS: ("LOGITS",),
    COSINE: ("EMBEDDING",),
    LATE: ("TOKEN_EMBEDDING",),
    SPARSE: ("SPARSE_INDICES", "SPARSE_VALUES"),
}

# How rows become what can be compared, and how that is done: one with each of others.
_COMPARED: Mapping[str, tuple[Callable[[Tensors], Sequence[Any]], Callable[[Any, Any], NDArray[np.float64]]]] = {
    COSINE: (lambda outputs: list(outputs["EMBEDDING"]), cosines),
    LATE: (lambda outputs: token_vectors(outputs["TOKEN_EMBEDDING"]), max_sim),
    SPARSE: (lambda outputs: terms(outputs["SPARSE_INDICES"], outputs["SPARSE_VALUES"]), shared_terms),
}


class ScoreRequest(ModelRequest):
    """vLLM's: queries and documents, in its earlier form text_1 and text_2; one query, or as many as documents.

    use_activation: false leaves the logit of a cross-encoder as it is.
    """

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "queries", "TEXT_PAIR": "documents"}

    queries: str | Strings | None = Field(None, description="a text, or a list of texts")
    documents: str | Strings | None = Field(None, description="a text, or a list of texts")
    text_1: str | Strings | None = None
    text_2: str | Strings | None = None
    score_type: ScoreType | None = None
    use_activation: bool | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Int32 | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Both, as lists. Raises ApiError unless each is there, by the names of one form."""
        forms = ("queries", self.queries, "documents", self.documents), ("text_1", self.text_1, "text_2", self.text_2)
        used = [form for form in forms if form[1] is not None or form[3] is not None]
        if len(used) != 1:
            raise invalid("queries", "both forms" if used else None, "queries and documents, or text_1 and text_2")
        first_name, first, second_name, second = used[0]
        if first is None or second is None:
            name = first_name if first is None else second_name
            raise ApiError(400, f"{name}: missing", param=name, code="missing_parameter")
        return [first] if isinstance(first, str) else first, [second] if isinstance(second, str) else second

    def field_of(self, name: str) -> str:
        """As of every request, by the names that it has."""
        field = super().field_of(name)
        return (
            field
            if self.queries is not None or self.text_1 is None
            else {"queries": "text_1", "documents": "text_2"}.get(field, field)
        )


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
async def create_score(body: ScoreRequest, context: Context) -> dict[str, Any]:
    """How well each document fits its query, or the only one."""
    target = await context.gateway.catalogue.find(body.model, KINDS)
    queries, documents = body.sides()
    if not documents or len(queries) not in (1, len(documents)):
        allowed = "one query, or as many as documents, of which there is at least one"
        raise invalid(body.field_of("queries"), f"{len(queries)} for {len(documents)} documents", allowed)
    parameters = body.request_parameters("truncate", "truncate_prompt_tokens")
    fields = body.field_of("queries"), body.field_of("documents")
    raw = body.use_activation is False
    scores, tokens = await score(context, target, queries, documents, parameters, fields, body.score_type, raw)
    data = [{"index": place, "object": "score", "score": float(one)} for place, one in enumerate(scores)]
    return list_of("score", body.model, data, tokens)


async def score(
    context: Context,
    target: Target,
    queries: Sequence[str],
    documents: Sequence[str],
    parameters: Mapping[str, Any],
    fields: tuple[str, str],
    score_type: str | None = None,
    raw: bool = False,
) -> tuple[NDArray[np.float64], int]:
    """A score [n] for each document with its query, or the only one; also how many tokens the model read.

    score_type: None: by what the model is before all; raw: whether a cross-encoder's is its logit. Raises ApiError, and
    as `infer_rows`.
    """
    kind = score_type or _TYPES.get(target.front.kind, CROSS)
    require_type(target, kind, "score_type" if score_type else "model", _OUTPUTS)
    names = _OUTPUTS[kind]
    if kind == CROSS:
        pairs = [*queries] * (len(documents) // len(queries))
        columns = {"TEXT": text_column(pairs, fields[0]), "TEXT_PAIR": text_column(documents, fields[1])}
        outputs, tokens = await infer_rows(context, target, columns, names, parameters)
        logits = outputs["LOGITS"] if raw else activated(target, outputs["LOGITS"])
        return logits[:, 0].astype(np.float64), tokens
    column = np.concatenate([text_column(queries, fields[0]), text_column(documents, fields[1])])
    outputs, tokens = await infer_rows(context, target, {"TEXT": column}, names, parameters)
    return _alike(kind, outputs, len(queries)), tokens


def _alike(kind: str, outputs: Tensors, queries: int) -> NDArray[np.float64]:
    """Scores of the rows behind the queries with their query."""
    read, compare = _COMPARED[kind]
    rows = read(outputs)
    if queries == 1:
        return compare(rows[0], rows[1:])
    pairs = zip(rows[:queries], rows[queries:], strict=True)
    return np.concatenate([compare(query, [document]) for query, document in pairs])
