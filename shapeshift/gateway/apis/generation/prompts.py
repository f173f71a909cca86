"""What a model would read of a conversation, without an answer: its text as llama-server has it, and its tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter

from shapeshift.gateway.answers.turn import TurnRequest, begin
from shapeshift.gateway.apis.fields import not_served
from shapeshift.gateway.apis.generation.chat import ChatRequest
from shapeshift.gateway.apis.generation.responses_request import ResponsesRequest
from shapeshift.gateway.endpoint import BodyRoute, Context

router = APIRouter(route_class=BodyRoute, tags=["tokens"])


class InputTokensRequest(ResponsesRequest):
    """OpenAI's: the body of a response, whose tokens are counted."""

    personality: Annotated[Any, not_served()] = None


@router.post("/apply-template")
async def apply_template(body: ChatRequest, context: Context) -> dict[str, Any]:
    """The prompt of a chat completion."""
    return {"prompt": (await begin(context, body)).prompt}


@router.post("/v1/chat/completions/input_tokens")
async def count_chat_tokens(body: ChatRequest, context: Context) -> dict[str, Any]:
    """The tokens of a chat completion's prompt."""
    return await _counted(body, context)


@router.post("/v1/responses/input_tokens")
async def count_response_tokens(body: InputTokensRequest, context: Context) -> dict[str, Any]:
    """The tokens of a response's prompt."""
    return await _counted(body, context)


async def _counted(body: TurnRequest, context: Context) -> dict[str, Any]:
    turn = await begin(context, body)
    return {"object": "response.input_tokens", "input_tokens": await turn.input_tokens(context)}
