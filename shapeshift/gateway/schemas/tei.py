"""The bodies of the routes of text-embeddings-inference (TEI). A server with several models needs their `model`."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field

from shapeshift.gateway.schemas.common import TEXTS, ApiRequest, Texts, not_served


class TeiRequest(ApiRequest):
    """model: which front is asked; None: the only one for the route."""

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Annotated[Literal["Left", "Right"] | None, not_served("Right")] = None


class EmbedRequest(TeiRequest):
    """The body of POST /embed. normalize: only true, which is TEI's default, for models whose vectors have length 1."""

    inputs: Texts = Field(description=TEXTS)
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class TeiRerankRequest(TeiRequest):
    """The body of POST /rerank."""

    query: str = Field(min_length=1)
    texts: list[str] = Field(min_length=1, max_length=2048)
    raw_scores: bool = False
    return_text: bool = False


class PredictRequest(TeiRequest):
    """The body of POST /predict."""

    inputs: str | list[str] | list[list[str]] = Field(
        description="a text, a pair of texts, or a list of lists with one text or one pair each"
    )
    raw_scores: bool = False

    def rows(self) -> tuple[list[list[str]], bool]:
        """Rows of one text or two, and whether there were several rows."""
        if isinstance(self.inputs, str):
            return [[self.inputs]], False
        if self.inputs and isinstance(self.inputs[0], list):
            return self.inputs, True
        return [cast(list[str], self.inputs)], False
