"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, cast

from pydantic import Field

from shapeshift.gateway.schemas.common import TEXTS, Int32, Texts, not_served
from shapeshift.gateway.schemas.sampling import SamplingRequest


class CompletionRequest(SamplingRequest):
    """OpenAI's, with fields of vLLM's and the request parameters of the generator."""

    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("text_input", "input_ids", "input_lengths"), "prompt")

    prompt: Texts = Field(description=TEXTS)
    best_of: Int32 | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[Int32, Field(ge=0)] | None = None
    suffix: Annotated[str | None, not_served("")] = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or as tokens."""
        return listed(self.prompt)


def listed(texts: Texts) -> list[str] | list[list[int]]:
    """Always a list: of texts, or of the tokens of each."""
    if isinstance(texts, str):
        return [texts]
    if texts and isinstance(texts[0], int):
        return [texts]
    return cast("list[str] | list[list[int]]", texts)
