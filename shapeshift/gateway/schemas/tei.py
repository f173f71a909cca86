"""The bodies of the routes of text-embeddings-inference (TEI). A server with several models needs their `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from shapeshift.gateway.schemas.common import TEXTS, ApiRequest, Rows, Texts, bounded, not_served


class TeiRequest(ApiRequest):
    """model: which front is asked; None: the only one for the route."""

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Annotated[Literal["Left", "Right"] | None, not_served("Right")] = None

    def parameters(self) -> dict[str, Any]:
        """The request parameters for the model."""
        return {} if self.truncate is None else {"truncate": self.truncate}


class EmbedRequest(TeiRequest):
    """The body of POST /embed. normalize: false leaves the vectors as the model makes them, of length 1 for some."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "inputs", "INPUT_IDS": "inputs"}

    inputs: Texts = Field(description=TEXTS)
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class TeiRerankRequest(TeiRequest):
    """The body of POST /rerank. top_n, which TEI leaves unread: texts in the answer, the best ones; None: all."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "query", "TEXT_PAIR": "texts"}

    query: str = Field(min_length=1)
    texts: Annotated[list[str], bounded(1)]
    raw_scores: bool = False
    return_text: bool = False
    top_n: Annotated[int, Field(ge=1)] | None = None


class PredictRequest(TeiRequest):
    """The body of POST /predict."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "inputs", "TEXT_PAIR": "inputs"}

    inputs: Rows = Field(description="a text, a pair of texts, or a list of lists with one text or one pair each")
    raw_scores: bool = False

    def rows(self) -> tuple[list[list[str]], bool]:
        """Rows of one text or two, and whether there were several rows."""
        if isinstance(self.inputs, str):
            return [[self.inputs]], False
        if self.inputs and isinstance(self.inputs[0], list):
            return self.inputs, True
        return [cast(list[str], self.inputs)], False
