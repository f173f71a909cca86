"""The fields that completions and chat completions share: how tokens are chosen, and how the answer is sent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from shapeshift.gateway.apis.fields import (
    ApiRequest,
    Int32,
    JsonObject,
    ModelRequest,
    Strings,
    TokenId,
    bounded,
    not_served,
)
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.generation import Usage

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Stop = str | Strings

# As many as the largest vocabularies have tokens.
_MOST_BIASES = 1 << 18


class StreamOptions(ApiRequest):
    """What else a stream holds. include_obfuscation: accepted and ignored, as nothing is padded.

    continuous_usage_stats: vLLM's: with `include_usage` every piece has the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(ApiRequest):
    """A schema that the answer follows. strict: accepted; the answer always follows the schema."""

    name: str
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(ApiRequest):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured_outputs(self) -> dict[str, Any] | None:
        """The same for the generator; None for any text. Raises ApiError for a schema that is missing."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        if self.json_schema is None:
            raise invalid("response_format.json_schema", None, "given where type is json_schema", "missing_parameter")
        return {"json": self.json_schema.schema_ if self.json_schema.schema_ is not None else True}


class GeneratorFields(ApiRequest):
    """What the generator takes under the same names; those beyond OpenAI's are vLLM's, with its names."""

    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], bounded(most=_MOST_BIASES)] | None = None
    n: Int32 | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    temperature: float | None = None
    top_p: float | None = None
    # vLLM's.
    add_special_tokens: bool | None = None
    bad_words: Strings | None = None
    ignore_eos: bool | None = None
    min_p: float | None = None
    min_tokens: Int32 | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Annotated[list[TokenId], bounded()] | None = None
    structured_outputs: JsonObject | None = None
    top_k: Int32 | None = None


class SamplingRequest(ModelRequest, GeneratorFields):
    """All fields that completions and chat completions share."""

    response_format: ResponseFormat | None = None
    stop: Stop | None = Field(None, description="a text, or a list of texts")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_beam_search: Annotated[bool | None, not_served(False)] = None

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def usage_of_piece(self, usage: Usage) -> dict[str, Any]:
        """What a piece of a stream says of the usage so far."""
        if self.stream_options is None or not self.includes_usage:
            return {}
        return {"usage": usage.body() if self.stream_options.continuous_usage_stats else None}

    def field_of(self, name: str) -> str:
        """As of every request; structured outputs come from one of several fields."""
        if name == "structured_outputs" and self.structured_outputs is None:
            return "response_format" if self.response_format is not None else "tools"
        return super().field_of(name)

    def sampling(self) -> dict[str, Any]:
        """The generator's input `sampling_parameters`, which checks the values. Raises ApiError for contradictions."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "a value", "left out unless stream is true")
        sampling = {name: value for name in GeneratorFields.model_fields if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            sampling["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.response_format is not None and (outputs := self.response_format.structured_outputs()):
            if self.structured_outputs is not None:
                raise ApiError(
                    400, "response_format: left out where structured_outputs is given", param="response_format"
                )
            sampling["structured_outputs"] = outputs
        return sampling
