"""The body of POST /v1/rerank, as Jina, Cohere and vLLM have it. TEI's is in `tei`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import orjson
from pydantic import Field

from shapeshift.gateway.schemas.common import ApiRequest, ModelRequest, bounded, not_served


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


def names_documents(body: bytes) -> bool:
    """Whether a body is a JSON object with `documents`; where TEI's route gets one, it is not TEI's."""
    if b'"documents"' not in body:
        return False
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(found, dict) and "documents" in found
