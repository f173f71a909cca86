"""A request to a generator, and the rows of its responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from shapeshift.errors import EngineError
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import Context
from shapeshift.triton.async_client import ModelCall, Tensors, first_of

# What this project's generators say, and OpenAI's word for it.
_REASONS = {"stop": "stop", "length": "length", "abort": "stop", "deadline": "length"}

TokenEntries = dict[str, Any]
"""Of one token: by id `logprob`, `rank`, `decoded_token` and `bytes`, the token itself first, then the likeliest."""


@dataclass(frozen=True)
class GenerationCall:
    """What is asked of a generator.

    sampling    its input `sampling_parameters`
    stream      whether the answer comes piece by piece
    parameters  its request parameters, without its adapter
    prompts     texts, or the tokens of each; those of a conversation come with its turn
    logprobs    whether each row has the logprobs of its tokens
    echo        whether whole answers begin with their prompt
    """

    target: Target
    sampling: Mapping[str, Any]
    stream: bool
    parameters: Mapping[str, Any]
    prompts: Sequence[str] | Sequence[Sequence[int]] = ()
    logprobs: bool = False
    echo: bool = False

    @property
    def choices(self) -> int:
        """The answers to each prompt."""
        return int(self.sampling.get("n") or 1)


@dataclass(frozen=True, slots=True)
class Row:
    """What is new of one choice: prompt x n + answer.

    cached_tokens  those of the prompt that were computed before; None: the front does not tell
    finish_reason  None while it goes on
    stop_reason    the stop text or token that ended it, as vLLM has it, or the generator's own word for another end
    logprobs       of each token, see the output `logprobs` in docs/fused_decode.md
    prompt_logprobs  with the first row of a prompt, if asked for; None for the first token
    """

    choice: int
    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[TokenEntries] | None = None
    prompt_logprobs: list[TokenEntries | None] | None = None


@dataclass
class Usage:
    """The tokens of a request so far.

    cached     those of its prompts that were computed before; None: the front does not tell
    reasoning  those of its answers that are thought; None: no model that thinks
    """

    choices: int
    prompts: dict[int, int] = field(default_factory=dict)
    completion: int = 0
    cached: int | None = None
    reasoning: int | None = None

    def count(self, row: Row, completion: bool = True) -> None:
        """Add what a row holds. completion: whether its tokens are part of the answer."""
        # A turn that goes on behind reasoning has a longer prompt then.
        prompt = row.choice // self.choices
        if row.cached_tokens is not None and prompt not in self.prompts:
            self.cached = (self.cached or 0) + row.cached_tokens
        self.prompts.setdefault(prompt, row.prompt_tokens)
        self.completion += row.tokens * completion

    @property
    def prompt(self) -> int:
        """The tokens of all prompts."""
        return sum(self.prompts.values())

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if self.cached is not None:
            body["prompt_tokens_details"] = {"cached_tokens": self.cached}
        if self.reasoning is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return body


async def rows(context: Context, call: GenerationCall) -> AsyncGenerator[list[Row], None]:
    """The rows of each response; those of all choices in one response without `stream`. Raises as `Upstream.stream`."""
    model_call = ModelCall(
        call.target.front.stream,
        _inputs(call),
        context.timeout_s,
        parameters={**call.parameters, **call.target.parameters},
        request_id=context.request_id,
    )
    usage, front = Usage(call.choices), call.target.front.name
    async with contextlib.aclosing(context.gateway.upstream.stream(model_call)) as responses:
        async for tensors in responses:
            # The last response of a stream may be empty.
            if "text_output" in tensors and len(tensors["text_output"]):
                answers = _rows_of(tensors, call.choices)
                read, generated = usage.prompt, usage.completion
                for row in answers:
                    usage.count(row)
                context.meter.count(front, usage.prompt - read, usage.completion - generated, call.stream)
                yield answers


async def all_rows(context: Context, call: GenerationCall) -> list[Row]:
    """The rows of the only response to a call without `stream`."""
    answers = await first_of(rows(context, call))
    if answers is None:
        raise EngineError(f"model {call.target.front.stream} ended its responses without one")
    return answers


def _inputs(call: GenerationCall) -> dict[str, Any]:
    yes = np.ones(1, bool)
    inputs: dict[str, Any] = {
        "stream": np.array([call.stream]),
        "return_finish_reason": yes,
        "return_num_input_tokens": yes,
        "return_num_output_tokens": yes,
    }
    if call.logprobs:
        inputs["return_logprobs"] = yes
    if call.echo:
        inputs["exclude_input_in_output"] = np.zeros(1, bool)
    if call.sampling:
        inputs["sampling_parameters"] = _texts([orjson.dumps(call.sampling)])
    if isinstance(call.prompts[0], str):
        inputs["text_input"] = _texts([str(prompt).encode() for prompt in call.prompts])
    else:
        inputs["input_ids"] = np.concatenate([np.array(ids, np.int32) for ids in call.prompts])
        inputs["input_lengths"] = np.array([len(ids) for ids in call.prompts], np.int32)
    return inputs


def _texts(values: Sequence[bytes]) -> Any:
    return np.array(values, dtype=object)


def _rows_of(tensors: Tensors, choices: int) -> list[Row]:
    texts = tensors["text_output"].tolist()
    indices = tensors["choice_index"].tolist() if "choice_index" in tensors else range(len(texts))
    tokens = tensors["num_output_tokens"].tolist()
    prompt_tokens = tensors["num_input_tokens"].tolist()
    cached = tensors["num_cached_tokens"].tolist() if "num_cached_tokens" in tensors else [None] * len(texts)
    reasons = tensors["finish_reason"].tolist() if "finish_reason" in tensors else [b""] * len(texts)
    stops = tensors["stop_reason"].tolist() if "stop_reason" in tensors else [b"null"] * len(texts)
    logprobs = tensors["logprobs"].tolist() if "logprobs" in tensors else [b"null"] * len(texts)
    prompt_logprobs = tensors["prompt_logprobs"].tolist() if "prompt_logprobs" in tensors else []
    answers = []
    for place, choice in enumerate(indices):
        reason = reasons[place].decode()
        prompt = choice // choices
        answers.append(
            Row(
                choice,
                texts[place].decode(errors="replace"),
                tokens[place],
                prompt_tokens[place],
                cached[place],
                _REASONS.get(reason, "stop") if reason else None,
                orjson.loads(stops[place]) if reason in ("", "stop", "length") else reason,
                orjson.loads(logprobs[place]),
                orjson.loads(prompt_logprobs[prompt]) if prompt < len(prompt_logprobs) else None,
            )
        )
    return answers


def likeliest(entries: TokenEntries, top: int) -> list[dict[str, Any]]:
    """Of the entries of one token the most likely ones, the likeliest first."""
    return sorted(entries.values(), key=lambda entry: int(entry["rank"]))[:top]
