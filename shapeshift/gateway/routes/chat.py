"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from shapeshift.errors import InvalidInputError
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.chat_renderer import TemplateSource
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.http import bodies
from shapeshift.gateway.http.streams import event, stream_of
from shapeshift.gateway.inference.generation import GenerationCall, Row, Usage, all_rows, rows
from shapeshift.gateway.inference.logprobs import chat_logprobs
from shapeshift.gateway.schemas.chat import ChatRequest, Function
from shapeshift.gateway.state import Gateway, answer, connected, gateway_of, id_of
from shapeshift.serving.description import GENERATION

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", openapi_extra=bodies.described(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """The next message of a conversation, whole or as server-sent events."""
    asked = await bodies.read(request, ChatRequest)
    gateway = gateway_of(request)
    target = await connected(request, gateway.catalogue.find(asked.model, (GENERATION,)))
    prompt = await connected(request, _prompt(gateway, target, asked))
    made = _ChatCompletion(asked, _call(gateway, target, asked, prompt, id_of(request)))
    if asked.stream:
        return await stream_of(request.receive, made.events(gateway), asked.field_of)
    found = await connected(request, all_rows(gateway.upstream, made.call))
    return answer(made.whole(found))


def _call(gateway: Gateway, target: Target, asked: ChatRequest, prompt: str, request_id: str) -> GenerationCall:
    # What stands before a text is the template's own.
    sampling = {**asked.sampling(), "add_special_tokens": False}
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise invalid("max_tokens", asked.max_tokens, "left out where max_completion_tokens is given")
    most = asked.max_completion_tokens or asked.max_tokens
    sampling["max_tokens"] = most if most is not None else target.front.number("max_tokens", 16)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs", asked.top_logprobs, "left out unless logprobs is true")
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs or 0
    if (function := asked.forced_function()) is not None:
        if "structured_outputs" in sampling:
            raise ApiError(400, "response_format: left out where tool_choice names a function", param="response_format")
        sampling["structured_outputs"] = {"json": function.parameters or {"type": "object"}}
    return GenerationCall(
        target=target,
        prompts=[prompt],
        sampling=sampling,
        stream=bool(asked.stream),
        logprobs=bool(asked.logprobs),
        echo=False,
        parameters=asked.parameters(),
        request_id=request_id,
        timeout_s=gateway.settings.request_timeout_s,
    )


async def _prompt(gateway: Gateway, target: Target, asked: ChatRequest) -> str:
    """The conversation as the model's template writes it. Raises ApiError for a model without one, or a refusal."""
    description = target.front.description
    tools = None
    if asked.tools and asked.tool_choice != "none":
        tools = [tool.for_template for tool in asked.tools]
    text = (description.get("tool_use_template") if tools else None) or description.get("chat_template")
    if not text:
        reason = (
            f"model: the checkpoint of {target.name} has no chat template: use /v1/completions, or put a"
            " chat_template.jinja into the folder of the checkpoint and build the model again"
        )
        raise ApiError(400, reason, param="model", code="model_not_supported")
    template = TemplateSource(str(text), description.get("special_tokens") or {})
    try:
        return await gateway.templates.render(template, [one.for_template() for one in asked.messages], tools)
    except InvalidInputError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from None


class _ChatCompletion:
    """The answer to one request."""

    def __init__(self, asked: ChatRequest, call: GenerationCall) -> None:
        self.call = call
        self._asked = asked
        self._function: Function | None = asked.forced_function()
        self._usage = Usage(call.choices)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._head = {"id": self._id, "created": int(time.time()), "model": asked.model}

    def whole(self, found: list[Row]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        choices = []
        for row in found:
            self._usage.count(row)
            message: dict[str, Any] = {"role": "assistant", "content": row.text, "refusal": None}
            if self._function is not None:
                message |= {"content": None, "tool_calls": [self._tool_call(row, self._function)]}
            choices.append(self._choice(row, {"message": message}))
        usage = self._usage.body()
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    async def events(self, gateway: Gateway) -> AsyncGenerator[bytes, None]:
        """The events of a stream, without the last one."""
        head = {**self._head, "object": "chat.completion.chunk"}
        usage = {"usage": None} if self._asked.includes_usage else {}
        begun: set[int] = set()
        async for found in rows(gateway.upstream, self.call):
            for row in found:
                self._usage.count(row)
                delta = self._delta(row, row.choice not in begun)
                begun.add(row.choice)
                yield event({**head, "choices": [self._choice(row, {"delta": delta})], **usage})
        if self._asked.includes_usage:
            yield event({**head, "choices": [], "usage": self._usage.body()})

    def _delta(self, row: Row, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        if self._function is None:
            return {**role, "content": row.text}
        call = self._tool_call(row, self._function)
        if not first:
            call = {"function": {"arguments": row.text}}
        return {**role, "tool_calls": [{"index": 0, **call}]}

    def _tool_call(self, row: Row, function: Function) -> dict[str, Any]:
        own = f"call_{self._id.removeprefix('chatcmpl-')}_{row.choice}"
        return {"id": own, "type": "function", "function": {"name": function.name, "arguments": row.text}}

    def _choice(self, row: Row, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._asked.logprobs:
            logprobs = chat_logprobs(row.logprobs or [], self._asked.top_logprobs or 0)
        reason = row.finish_reason
        if reason == "stop" and self._asked.tool_choice == "required":
            # OpenAI's word; of a function that the request names it says stop.
            reason = "tool_calls"
        found = {"index": row.choice, **said, "logprobs": logprobs, "finish_reason": reason}
        return found if row.stop_reason is None else {**found, "stop_reason": row.stop_reason}
