"""POST /v1/completions."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field

from shapeshift.gateway.apis.fields import TEXTS, Int32, Texts, listed, not_served
from shapeshift.gateway.apis.generation.sampling import SamplingRequest
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import BodyRoute, Context, event
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.generation import GenerationCall, Row, TokenEntries, Usage, all_rows, likeliest, rows
from shapeshift.serving.description import GENERATION

router = APIRouter(route_class=BodyRoute, tags=["completions"])


class CompletionRequest(SamplingRequest):
    """OpenAI's, with fields of vLLM's and the request parameters of the generator."""

    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("text_input", "input_ids", "input_lengths"), "prompt")

    prompt: Texts = Field(description=TEXTS)
    best_of: Int32 | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[Int32, Field(ge=0)] | None = None
    # vLLM's.
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Annotated[str | None, not_served("")] = None


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, context: Context) -> dict[str, Any] | AsyncGenerator[bytes, None]:
    """Text that continues a prompt, whole or as server-sent events."""
    target = await context.gateway.catalogue.find(body.model, (GENERATION,))
    completion = _Completion(body, _call(target, body))
    return completion.events(context) if body.stream else await completion.whole(context)


def _call(target: Target, body: CompletionRequest) -> GenerationCall:
    prompts = listed(body.prompt)
    sampling = body.sampling()
    for name in ("best_of", "max_tokens", "logprobs", "prompt_logprobs"):
        if (value := getattr(body, name)) is not None:
            sampling[name] = value
    if body.echo and body.stream and not isinstance(prompts[0], str):
        raise ApiError(400, "prompt: a text with both echo and stream", param="prompt", code="unsupported_parameter")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs: not with stream", param="prompt_logprobs", code="unsupported_parameter")
    if body.echo and body.logprobs is not None:
        sampling["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.max_tokens == 0:
        if not body.echo:
            raise ApiError(400, "max_tokens: got 0; at least 1 without echo", param="max_tokens", code="invalid_value")
        # What is generated is left out of the answer: its tokens say where it begins.
        sampling["max_tokens"] = 1
        sampling.setdefault("logprobs", 0)
    return GenerationCall(
        target=target,
        prompts=prompts,
        sampling=sampling,
        stream=bool(body.stream),
        logprobs="logprobs" in sampling,
        # A stream gets its prompt from the gateway, for generators repeat it in whole answers only.
        echo=bool(body.echo) and not body.stream,
        parameters=body.request_parameters(),
    )


class _Completion:
    """The answer, whole or as a stream of events."""

    def __init__(self, body: CompletionRequest, call: GenerationCall) -> None:
        self._body = body
        self._call = call
        # Whether it leaves out what is generated.
        self._is_empty = body.max_tokens == 0
        self._usage = Usage(call.choices)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._scored: dict[int, Sequence[TokenEntries | None]] = {}
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "object": "text_completion",
        }

    async def whole(self, context: Context) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        choices = [self._as_choice(row, self._choice(row, True)) for row in await all_rows(context, self._call)]
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The events of a stream, without the last one."""
        begun: set[int] = set()
        async for answers in rows(context, self._call):
            for row in answers:
                delta = self._delta(row, row.choice not in begun)
                begun.add(row.choice)
                choice = self._as_choice(row, delta)
                yield event({**self._head, "choices": [choice], **self._body.usage_of_piece(self._usage)})
        if self._body.includes_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.body()})

    def _as_choice(self, row: Row, said: dict[str, Any]) -> dict[str, Any]:
        self._usage.count(row, completion=not self._is_empty)
        choice = {"index": row.choice, "finish_reason": row.finish_reason, **said}
        return choice if row.stop_reason is None else {**choice, "stop_reason": row.stop_reason}

    def _choice(self, row: Row, first: bool) -> dict[str, Any]:
        logprobs = None
        # Of all answers to a prompt, the first response of a stream has them once.
        prompt = row.choice // self._call.choices
        self._scored.setdefault(prompt, row.prompt_logprobs or [])
        if self._body.logprobs is not None:
            scored = self._scored[prompt] if first and self._body.echo else []
            logprobs = self._logprobs.setdefault(row.choice, CompletionLogprobs(self._body.logprobs)).of(
                [] if self._is_empty else row.logprobs or [], self._prompt(row) if scored else "", scored
            )
        choice = {"text": self._prompt(row) if self._is_empty else row.text, "logprobs": logprobs}
        return choice if self._body.prompt_logprobs is None else {**choice, "prompt_logprobs": self._scored[prompt]}

    def _delta(self, row: Row, first: bool) -> dict[str, Any]:
        choice = self._choice(row, first)
        if self._body.echo:
            prompt = self._prompt(row) if first else ""
            choice["text"] = prompt if self._is_empty else f"{prompt}{row.text}"
        return choice

    def _prompt(self, row: Row) -> str:
        """The prompt's text; of one that is tokens, what stands before the text of the answer's tokens."""
        prompt = self._call.prompts[row.choice // self._call.choices]
        if isinstance(prompt, str):
            return prompt
        answer = _text_of(row.logprobs or [])
        # A stop string and what follows it are left out of the answer.
        length = next(length for length in range(len(answer), -1, -1) if row.text.endswith(answer[:length]))
        return row.text[: len(row.text) - length]


class CompletionLogprobs:
    """`logprobs` of one choice: parallel lists.

    top: how many of the most likely tokens each token has beside it. Offsets go on over the pieces of a stream; that of
    a token is the number of whole characters before its first byte.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(
        self, tokens: Sequence[TokenEntries], prompt: str = "", scored: Sequence[TokenEntries | None] = ()
    ) -> dict[str, Any]:
        """Of the next tokens, behind those of `prompt`: of these the first, None, has no logprob."""
        begun = prompt[: len(prompt) - len(_text_of(entries for entries in scored if entries))]
        lists: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entries in (*scored, *tokens):
            token = next(iter(entries.values())) if entries else None
            lists["text_offset"].append(self._begin(bytes(token["bytes"]) if token else begun.encode()))
            lists["tokens"].append(token["decoded_token"] if token else begun)
            lists["token_logprobs"].append(token["logprob"] if token else None)
            lists["top_logprobs"].append(_top(entries, self._top) if entries else None)
        return lists

    def _begin(self, token: bytes) -> int:
        """The offset of the next token."""
        first = self._characters.decode(token[:1])
        # The byte begins a character that is not complete, or ends the last one; U+FFFD before it is for other bytes.
        begins = self._characters.getstate()[0] == token[:1]
        offset = self._offset + len(first) - (first != "" and not begins)
        self._offset += len(first) + len(self._characters.decode(token[1:]))
        return offset


def _text_of(tokens: Iterable[TokenEntries]) -> str:
    """The text of tokens that follow one another; a character may consist of several."""
    return b"".join(bytes(next(iter(entries.values()))["bytes"]) for entries in tokens).decode(errors="replace")


def _top(entries: TokenEntries, top: int) -> dict[str, float]:
    """The most likely tokens and the token itself; of two with the same text the likelier one."""
    token, *_ = entries.values()
    logprobs: dict[str, float] = {}
    for entry in [*likeliest(entries, top), token]:
        logprobs.setdefault(entry["decoded_token"], entry["logprob"])
    return logprobs
