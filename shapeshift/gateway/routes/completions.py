"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.http import bodies
from shapeshift.gateway.http.streams import event, stream_of
from shapeshift.gateway.inference.generation import GenerationCall, Row, Usage, all_rows, rows
from shapeshift.gateway.inference.logprobs import CompletionLogprobs, text_of
from shapeshift.gateway.schemas.completions import CompletionRequest
from shapeshift.gateway.state import Gateway, answer, connected, gateway_of, id_of
from shapeshift.serving.description import GENERATION

router = APIRouter(tags=["completions"])


@router.post("/v1/completions", openapi_extra=bodies.described(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Text that continues a prompt, whole or as server-sent events."""
    asked = await bodies.read(request, CompletionRequest)
    gateway = gateway_of(request)
    target = await connected(request, gateway.catalogue.find(asked.model, (GENERATION,)))
    call = _call(gateway, target, asked, id_of(request))
    made = _Completion(asked, call)
    if asked.stream:
        return await stream_of(request.receive, made.events(gateway), asked.field_of)
    found = await connected(request, all_rows(gateway.upstream, call))
    return answer(made.whole(found))


def _call(gateway: Gateway, target: Target, asked: CompletionRequest, request_id: str) -> GenerationCall:
    sampling = asked.sampling()
    for name in ("best_of", "max_tokens", "logprobs"):
        if (value := getattr(asked, name)) is not None:
            sampling[name] = value
    if asked.echo and asked.stream and (asked.logprobs is not None or not isinstance(asked.prompts()[0], str)):
        field = "prompt" if asked.logprobs is None else "logprobs"
        raise ApiError(400, f"{field}: not with both echo and stream", param=field, code="unsupported_parameter")
    if asked.echo and asked.logprobs is not None:
        sampling["prompt_logprobs"] = asked.logprobs
    if asked.max_tokens == 0:
        if not asked.echo:
            raise ApiError(400, "max_tokens: got 0; at least 1 without echo", param="max_tokens", code="invalid_value")
        # What is generated is left out of the answer: its tokens say where it begins.
        sampling["max_tokens"] = 1
        sampling.setdefault("logprobs", 0)
    return GenerationCall(
        target=target,
        prompts=asked.prompts(),
        sampling=sampling,
        stream=bool(asked.stream),
        logprobs="logprobs" in sampling,
        # A stream gets its prompt from the gateway, for generators repeat it in whole answers only.
        echo=bool(asked.echo) and not asked.stream,
        parameters=asked.parameters(),
        request_id=request_id,
        timeout_s=gateway.settings.request_timeout_s,
    )


class _Completion:
    """The answer to one request."""

    def __init__(self, asked: CompletionRequest, call: GenerationCall) -> None:
        self._asked = asked
        self._call = call
        self._usage = Usage(call.choices)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, found: list[Row]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        choices = [self._choice(row) for row in found]
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    async def events(self, gateway: Gateway) -> AsyncGenerator[bytes, None]:
        """The events of a stream, without the last one."""
        usage = {"usage": None} if self._asked.includes_usage else {}
        begun: set[int] = set()
        async for found in rows(gateway.upstream, self._call):
            for row in found:
                choice = self._choice(row)
                if self._asked.echo and row.choice not in begun:
                    choice["text"] = f"{self._prompt(row)}{choice['text']}"
                begun.add(row.choice)
                yield event({**self._head, "choices": [choice], **usage})
        if self._asked.includes_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.body()})

    def _prompt(self, row: Row) -> str:
        """The prompt's text; of one that is tokens, what stands before the text of the answer's tokens."""
        prompt = self._call.prompts[row.choice // self._call.choices]
        if isinstance(prompt, str):
            return prompt
        answer = text_of(row.logprobs or [])
        # A stop string and what follows it are left out of the answer.
        length = next(length for length in range(len(answer), -1, -1) if row.text.endswith(answer[:length]))
        return row.text[: len(row.text) - length]

    def _choice(self, row: Row) -> dict[str, Any]:
        nothing = self._asked.max_tokens == 0
        self._usage.count(row, completion=not nothing)
        text, logprobs = row.text, None
        if nothing and self._asked.stream:
            # `events` puts the prompt before the first piece.
            text = ""
        elif nothing:
            text = self._prompt(row)
        if self._asked.logprobs is not None:
            own = self._logprobs.setdefault(row.choice, CompletionLogprobs(self._asked.logprobs))
            scored = row.prompt_logprobs or []
            logprobs = own.of([] if nothing else row.logprobs or [], self._prompt(row) if scored else "", scored)
        found = {"index": row.choice, "text": text, "logprobs": logprobs, "finish_reason": row.finish_reason}
        return found if row.stop_reason is None else {**found, "stop_reason": row.stop_reason}
