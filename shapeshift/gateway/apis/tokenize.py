"""POST /tokenize and /detokenize, as vLLM has them; /tokenize also has the shape of text-embeddings-inference (TEI)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from shapeshift.gateway.apis.fields import (
    MOST_TOKENS,
    ApiRequest,
    JsonObject,
    Strings,
    TokenId,
    bounded,
    has_field,
    not_served,
)
from shapeshift.gateway.apis.generation.chat import Message, Tool, continues
from shapeshift.gateway.conversation import Conversation
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.tokens import Tokens, tokens_of
from shapeshift.serving.description import (
    EMBEDDING,
    GENERATION,
    RERANKING,
    SPARSE_EMBEDDING,
    TEXT_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    TOKEN_EMBEDDING,
)

router = APIRouter(route_class=BodyRoute, tags=["tokens"])

_ENCODERS = (
    *(EMBEDDING, SPARSE_EMBEDDING, TOKEN_EMBEDDING, RERANKING, TEXT_CLASSIFICATION),
    TOKEN_CLASSIFICATION,
)
_MOST_MESSAGES = 4096


class TokenizeRequest(ApiRequest):
    """vLLM's. add_special_tokens: by default those of a prompt are there, and a template writes its own."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "prompt", "text_input": "prompt"}

    model: str | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[Message], bounded(1, _MOST_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], bounded()] | None = None
    chat_template: Annotated[Any, not_served()] = None
    media_io_kwargs: Annotated[Any, not_served()] = None
    mm_processor_kwargs: Annotated[Any, not_served()] = None

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_of", "prompt, messages or inputs: one of them")
        return self

    @classmethod
    def class_of(cls, body: bytes) -> type[ApiRequest]:
        """A JSON object with `inputs` is TEI's."""
        return TeiTokenizeRequest if has_field(body, "inputs") else cls

    def field_of(self, name: str) -> str:
        """As of every request; a prompt may come of messages."""
        field = super().field_of(name)
        return "messages" if field == "prompt" and self.prompt is None else field


class TeiTokenizeRequest(ApiRequest):
    """TEI's. model: which front is asked; None: the only one that reads texts and does not generate."""

    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("input", "TEXT", "text_input"), "inputs")
    common = ("prompt_name",)

    model: str | None = None
    inputs: str | Strings = Field(description="a text, or a list of texts")
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DetokenizeRequest(ApiRequest):
    """vLLM's."""

    made_of: ClassVar[Mapping[str, str]] = {"input_ids": "tokens", "input_lengths": "tokens"}

    model: str | None = None
    tokens: Annotated[list[TokenId], bounded(1, MOST_TOKENS)]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest | TeiTokenizeRequest, context: Context) -> object:
    """The tokens of a prompt or a conversation; a body with `inputs`: those of texts, as TEI has them."""
    catalogue = context.gateway.catalogue
    kinds = (GENERATION, *_ENCODERS)
    if isinstance(body, TeiTokenizeRequest):
        target = await catalogue.only(body.model, kinds if body.model else _ENCODERS)
        inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        listed = await tokens_of(context, target, inputs, body.request_parameters())
        return [_of_tei(one if body.add_special_tokens else one.without_special()) for one in listed]
    target = await catalogue.only(body.model, kinds if body.model else (GENERATION,))
    prompt = body.prompt
    if prompt is None:
        chat = Conversation(
            [one.for_template() for one in body.messages or ()],
            [tool.for_template for tool in body.tools or ()],
            options=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt is not False,
            continues=continues(body.continue_final_message, body.add_generation_prompt),
        )
        prompt = await context.gateway.templates.prompt(target, chat)
    (tokens,) = await tokens_of(context, target, [prompt])
    adds = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    tokens = tokens if adds else tokens.without_special()
    return {
        "count": len(tokens.ids),
        "max_model_len": target.front.number("max_tokens", 0),
        "tokens": tokens.ids,
        "token_strs": tokens.names if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: Context) -> dict[str, Any]:
    """The text of tokens."""
    target = await context.gateway.catalogue.only(body.model, (GENERATION,))
    (tokens,) = await tokens_of(context, target, [body.tokens])
    return {"prompt": tokens.text}


def _of_tei(tokens: Tokens) -> list[dict[str, Any]]:
    listed = []
    for token, name, (start, stop), special in zip(
        tokens.ids, tokens.names, tokens.offsets, tokens.special, strict=True
    ):
        place: tuple[int | None, int | None] = (None, None) if special else (start, stop)
        text = name if special else tokens.text[start:stop]
        listed.append({"id": token, "text": text, "special": bool(special), "start": place[0], "stop": place[1]})
    return listed
