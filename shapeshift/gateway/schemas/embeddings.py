"""The body of POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from shapeshift.gateway.schemas.common import TEXTS, ModelRequest, Texts

MOST_INPUTS = 2048


class EmbeddingRequest(ModelRequest):
    """OpenAI's; prompt_name and truncate are request parameters of the technique `polymorph`."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "input", "INPUT_IDS": "input"}

    input: Texts = Field(description=TEXTS)
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
