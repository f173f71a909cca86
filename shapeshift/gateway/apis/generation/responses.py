"""POST /v1/responses: OpenAI's API of answers in items, of which nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Response

from shapeshift.errors import ShapeshiftError
from shapeshift.gateway.answers.pieces import ArgumentsPiece, CallBegun, Piece, ReasoningPiece, TextPiece
from shapeshift.gateway.answers.turn import Turn, begin
from shapeshift.gateway.apis.generation.responses_request import ResponsesRequest
from shapeshift.gateway.endpoint import DONE, BodyRoute, Context, event, event_stream
from shapeshift.gateway.errors import ApiError, api_error

router = APIRouter(route_class=BodyRoute, tags=["responses"])

# Of each type of item: its id, and what its events are called.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EVENTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_OF_TOOLS = {"type", "name", "description", "parameters", "strict"}
_IN_PROGRESS, _COMPLETED, _INCOMPLETE, _FAILED = "in_progress", "completed", "incomplete", "failed"


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, context: Context) -> dict[str, Any] | Response:
    """The next items of a conversation, whole or as server-sent events."""
    answer = _Answer(body, await begin(context, body))
    if not body.stream:
        return await answer.whole(context)
    return await event_stream(answer.events(context), answer.failed, DONE)


class _Answer:
    """The answer in the shape of the API: its items, and the events that tell of them."""

    def __init__(self, body: ResponsesRequest, turn: Turn) -> None:
        self._body = body
        self._turn = turn
        self._created = int(time.time())
        self._id = f"resp_{uuid.uuid4().hex}"
        self._status = _IN_PROGRESS
        self._error: dict[str, Any] | None = None
        self._items: list[dict[str, Any]] = []
        # Of the last item, while it goes on.
        self._texts: list[str] | None = None
        self._number = -1

    async def whole(self, context: Context) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        async for _ in self._told(context):
            pass
        return self._shown()

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The events of a stream, without the last one."""
        async for content in self._told(context):
            yield self._event(content)

    def failed(self, error: ShapeshiftError | ApiError) -> bytes:
        """The event of an error."""
        refusal = api_error(error, self._body.field_of)
        code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
        self._status, self._error = _FAILED, {"code": code, "message": refusal.message}
        return self._event({"type": "response.failed", "response": self._shown()})

    def _event(self, content: dict[str, Any]) -> bytes:
        self._number += 1
        return event({**content, "sequence_number": self._number}, content["type"])

    async def _told(self, context: Context) -> AsyncGenerator[dict[str, Any], None]:
        reason: str | None = None
        has_begun = False
        async for parts in self._turn.parts(context):
            if not has_begun:
                has_begun = True
                for step in ("created", "in_progress"):
                    yield {"type": f"response.{step}", "response": self._shown()}
            for part in parts:
                for piece in part.pieces:
                    for one in self._added(piece):
                        yield one
                reason = part.row.finish_reason
        status = _INCOMPLETE if reason == "length" else _COMPLETED
        for one in self._closed(status):
            yield one
        self._status = status
        yield {"type": f"response.{status}", "response": self._shown()}

    def _added(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if isinstance(piece, TextPiece):
            yield from self._opened("message", {"role": "assistant", "content": []})
            yield from self._delta(piece.text, {"logprobs": []})
        elif isinstance(piece, ReasoningPiece):
            yield from self._opened("reasoning", {"summary": [], "content": []})
            yield from self._delta(piece.text)
        elif isinstance(piece, CallBegun):
            yield from self._closed(_COMPLETED)
            yield from self._opened("function_call", {"call_id": piece.id, "name": piece.name, "arguments": ""})
        elif isinstance(piece, ArgumentsPiece):
            yield from self._delta(piece.text)

    def _opened(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begin an item of this type, unless one goes on."""
        if self._texts is not None and self._items[-1]["type"] == kind:
            return
        yield from self._closed(_COMPLETED)
        self._texts = []
        item_id = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
        self._items.append({"id": item_id, "type": kind, "status": _IN_PROGRESS, **fields})
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": self._items[-1]}
        if kind != "function_call":
            yield {"type": "response.content_part.added", **self._place(), "part": _part(kind, "")}

    def _delta(self, text: str, more: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        assert self._texts is not None
        self._texts.append(text)
        kind = self._items[-1]["type"]
        yield {"type": f"response.{_EVENTS[kind]}.delta", **self._place(), "delta": text, **(more or {})}

    def _closed(self, status: str) -> Iterator[dict[str, Any]]:
        """End the item that goes on."""
        if self._texts is None:
            return
        item, text = self._items[-1], "".join(self._texts)
        kind = item["type"]
        done = {"type": f"response.{_EVENTS[kind]}.done", **self._place()}
        self._texts = None
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            yield {**done, "name": item["name"], "arguments": text}
        else:
            part = _part(kind, text)
            item["content"] = [part]
            yield {**done, "text": text, **({"logprobs": []} if kind == "message" else {})}
            yield {"type": "response.content_part.done", **self._place(), "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        """Of which part of the answer an event tells."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}

    def _shown(self) -> dict[str, Any]:
        """The response as it is now."""
        body, is_over = self._body, self._status in (_COMPLETED, _INCOMPLETE)
        choice = body.tool_choice or "auto"
        form = {"type": "text"} if body.format is None else body.format.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == _COMPLETED else None,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == _INCOMPLETE else None,
            "model": body.model,
            "output": self._items if self._status != _IN_PROGRESS else [],
            "usage": self._usage() if is_over else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": body.service_tier or "default",
            "store": False,
            "background": False,
            # What the generator takes where the request does not say.
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "top_logprobs": 0,
            "text": {"format": form},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(include=_OF_TOOLS) for tool in body.tools or ()],
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.usage.body()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._turn.usage.cached or 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._turn.usage.reasoning or 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
