"""The body of POST /v1/classify, as vLLM has it, for texts and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from shapeshift.gateway.schemas.common import Int32, ModelRequest, Rows


class ClassifyRequest(ModelRequest):
    """input: texts, beside vLLM's pairs of them, or for an image model data URLs.

    task, level and min_accuracy are request parameters of models.
    """

    # A front calls the pixels of a decoded IMAGE `image`.
    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("TEXT", "TEXT_PAIR", "IMAGE", "image"), "input")

    input: Rows = Field(description="a text, a list of texts, or a list of lists with one text or one pair each")
    truncate: bool | None = None
    task: str | None = None
    level: Annotated[Int32, Field(ge=1)] | None = None
    min_accuracy: float | None = None

    def rows(self) -> list[list[str]]:
        """Rows of one text or two."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        return [[row] if isinstance(row, str) else row for row in texts]
