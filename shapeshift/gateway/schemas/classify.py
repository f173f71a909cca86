"""The body of POST /v1/classify, as vLLM has it, for texts and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from shapeshift.gateway.schemas.common import Int32, ModelRequest, Strings


class ClassifyRequest(ModelRequest):
    """input: texts, or for an image model data URLs. task, level and min_accuracy are request parameters of models."""

    # A front calls the pixels of a decoded IMAGE `image`.
    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("TEXT", "TEXT_PAIR", "IMAGE", "image"), "input")

    input: str | Strings = Field(description="a text or a list of texts, none of them empty")
    truncate: bool | None = None
    task: str | None = None
    level: Annotated[Int32, Field(ge=1)] | None = None
    min_accuracy: float | None = None
