"""POST /v1/messages and POST /v1/messages/count_tokens: conversations as Anthropic has them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import orjson
from fastapi import APIRouter, Response

from shapeshift.errors import ShapeshiftError
from shapeshift.gateway.answers.pieces import ArgumentsPiece, CallBegun, Piece, ReasoningPiece, TextPiece
from shapeshift.gateway.answers.turn import Turn, begin
from shapeshift.gateway.apis.generation.messages_request import CountRequest, MessagesRequest
from shapeshift.gateway.endpoint import BodyRoute, Context, event, event_stream
from shapeshift.gateway.errors import MESSAGES, ApiError, api_error

router = APIRouter(route_class=BodyRoute, tags=["messages"])

# What the API says beside, of which nothing is known here.
_SERVICE = ("cache_creation", "inference_geo", "service_tier")
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


@router.post(MESSAGES)
async def create_message(body: MessagesRequest, context: Context) -> dict[str, Any] | Response:
    """The next message of a conversation, whole or as server-sent events."""
    message = _Message(body, await begin(context, body))
    if not body.stream:
        return await message.whole(context)
    return await event_stream(message.events(context), message.failed)


@router.post(f"{MESSAGES}/count_tokens")
async def count_tokens(body: CountRequest, context: Context) -> dict[str, Any]:
    """The tokens of a conversation, as a model reads them."""
    turn = await begin(context, body)
    return {"input_tokens": await turn.input_tokens(context)}


class _Message:
    """The answer in Anthropic's shape: its blocks, and the events that tell of them."""

    def __init__(self, body: MessagesRequest, turn: Turn) -> None:
        self._body = body
        self._turn = turn
        self._id = f"msg_{uuid.uuid4().hex}"
        self._content: list[dict[str, Any]] = []
        # Of the last block, while it is open.
        self._texts: list[str] | None = None
        self._reason: str | None = None
        self._stop_sequence: str | None = None

    async def whole(self, context: Context) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        async for _ in self._told(context):
            pass
        return self._shown(self._content)

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        async for content in self._told(context):
            yield event(content, content["type"])

    def failed(self, error: ShapeshiftError | ApiError) -> bytes:
        """The event of an error."""
        return event(api_error(error, self._body.field_of).body(MESSAGES), "error")

    async def _told(self, context: Context) -> AsyncGenerator[dict[str, Any], None]:
        has_begun = False
        async for parts in self._turn.parts(context):
            for part in parts:
                if not has_begun:
                    has_begun = True
                    yield {"type": "message_start", "message": self._shown([])}
                    yield {"type": "ping"}
                for piece in part.pieces:
                    for one in self._added(piece):
                        yield one
                self._reason = part.row.finish_reason
                if part.row.stop_reason in (self._body.stop_sequences or ()):
                    self._stop_sequence = str(part.row.stop_reason)
        for one in self._closed():
            yield one
        yield {"type": "message_delta", "delta": self._ended(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _added(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if isinstance(piece, TextPiece):
            yield from self._opened({"type": "text", "text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": piece.text}, piece.text)
        elif isinstance(piece, ReasoningPiece):
            yield from self._opened({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.text}, piece.text)
        elif isinstance(piece, CallBegun):
            yield from self._closed()
            call = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}, "caller": {"type": "direct"}}
            yield from self._opened(call)
        elif isinstance(piece, ArgumentsPiece):
            yield self._delta({"type": "input_json_delta", "partial_json": piece.text}, piece.text)

    def _opened(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begin this block, unless one of its type is open."""
        if self._texts is not None and self._content[-1]["type"] == block["type"]:
            return
        yield from self._closed()
        self._content.append(block)
        self._texts = []
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any], text: str) -> dict[str, Any]:
        assert self._texts is not None
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _closed(self) -> Iterator[dict[str, Any]]:
        """End the block that is open."""
        if self._texts is None:
            return
        block, text = self._content[-1], "".join(self._texts)
        self._texts = None
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        index = len(self._content) - 1
        if block["type"] == "thinking":
            # Clients send no thought back that has none. It is not looked at then.
            block["signature"] = self._id
            delta = {"type": "signature_delta", "signature": self._id}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    def _stop_reason(self) -> str | None:
        if self._reason is None:
            return None
        if self._stop_sequence is not None:
            return "stop_sequence"
        if self._reason == "stop" and self._content and self._content[-1]["type"] == "tool_use":
            return "tool_use"
        return _REASONS.get(self._reason, "end_turn")

    def _ended(self) -> dict[str, Any]:
        """Why it has ended; nothing while it goes on."""
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence}
        return {**stop, "stop_details": None, "container": None}

    def _shown(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message."""
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._body.model, "content": content}
        return {**head, **self._ended(), "usage": {**self._usage(), **dict.fromkeys(_SERVICE)}}

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.usage
        details = None if usage.reasoning is None else {"thinking_tokens": usage.reasoning}
        # Apart from those that were computed before.
        cached = usage.cached or 0
        return {
            "input_tokens": usage.prompt - cached,
            "output_tokens": usage.completion,
            "output_tokens_details": details,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "server_tool_use": None,
        }


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none where the answer was cut within them."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
