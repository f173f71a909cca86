"""The parameters of a request for text: read from its inputs or from the keys of `sampling_parameters`, and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.policy_api import Check, integer, list_of, number
from shapeshift.serving.parameters import hint
from shapeshift.serving.pb_utils import InferenceRequest, PbUtils

_MAX_STOPS = 16
_MAX_STOP_LENGTH = 256
# Sampling computes in FLOAT32: beyond these, a parameter or a penalised logit becomes 0 or infinity.
_LEAST, _MOST = 1e-30, 1e30

RETURNS: Mapping[str, tuple[str, ...]] = {
    "return_finish_reason": ("finish_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_request_id": ("request_id",),
    "return_timings": ("queue_ms", "prefill_ms", "decode_ms"),
}
"""Inputs of type BOOL, and the outputs that each adds to the response."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when the answer ends; names and meanings are vLLM's.

    max_tokens          most tokens of the answer
    temperature         0: always the most likely token
    top_k               keep only this many of the most likely tokens; 0 or -1: all
    top_p               keep only the most likely tokens that together have this probability
    min_p               keep only tokens with at least this share of the most likely one's probability
    repetition_penalty  above 1: tokens that occur in the prompt or the answer become less likely
    seed                of the random numbers; None: a new one for each request
    stop                texts that end the answer and are not part of it
    ignore_eos          whether the answer continues after an end-of-sequence token
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class ParsedRequest:
    """The inputs of one request.

    text                the prompt in UTF-8
    echo                whether the answer begins with the prompt
    outputs             outputs beyond the text that the answer carries
    request_parameters  request parameters that the input `sampling_parameters` holds, not checked yet
    """

    text: bytes
    sampling_params: SamplingParams
    stream: bool
    echo: bool
    outputs: frozenset[str]
    request_parameters: Mapping[str, Any] = field(default_factory=dict)


class RequestParser:
    """Reads the requests of one model.

    request_parameters: names of request parameters that the input `sampling_parameters` may hold too.
    """

    def __init__(self, pb_utils: PbUtils, vocab_size: int, request_parameters: Collection[str] = ()) -> None:
        self._get = pb_utils.get_input_tensor_by_name
        self._request_parameters = request_parameters
        self._checks: dict[str, Check] = {
            "max_tokens": integer(minimum=1),
            "temperature": number(minimum=0, maximum=_MOST),
            "top_k": integer(minimum=-1, maximum=vocab_size),
            "top_p": number(minimum=_LEAST, maximum=1),
            "min_p": number(minimum=0, maximum=1),
            "repetition_penalty": number(minimum=_LEAST, maximum=_MOST),
            "seed": integer(minimum=-(2**63), maximum=2**63 - 1),
            "stop": _stops,
            "ignore_eos": _flag,
        }

    def stop_id(self, request: InferenceRequest) -> str | None:
        """The id of the request to end; None for a request for text. Raises InvalidInputError for both at once."""
        name: str | None = self._one(request, "stop_id", _text)
        if name is not None and self._get(request, "text_input") is not None:
            raise InvalidInputError("stop_id", name, "alone, without text_input")
        if name == "":
            raise InvalidInputError("stop_id", name, "the id of a request")
        return name

    def parse(self, request: InferenceRequest) -> ParsedRequest:
        """The inputs of a request for text. Raises InvalidInputError naming the input, its value and the limit."""
        prompt = self._one(request, "text_input", lambda name, value: value)
        if prompt is None:
            raise InvalidInputError("text_input", None, "this input is required")
        stream = bool(self._one(request, "stream", _flag))
        echo = self._one(request, "exclude_input_in_output", _flag) is False
        if stream and echo:
            raise InvalidInputError("exclude_input_in_output", False, "true when stream is true")
        sampling = self._sampling_parameters(request)
        request_parameters = {key: sampling.pop(key) for key in self._request_parameters if key in sampling}
        returned = [outputs for name, outputs in RETURNS.items() if self._one(request, name, _flag)]
        return ParsedRequest(
            text=prompt.encode() if isinstance(prompt, str) else bytes(prompt),
            sampling_params=self._sampling_params(request, sampling),
            stream=stream,
            echo=echo,
            outputs=frozenset(output for outputs in returned for output in outputs),
            request_parameters=request_parameters,
        )

    def _sampling_params(self, request: InferenceRequest, sampling: Mapping[str, Any]) -> SamplingParams:
        given = {
            key: self._checks[key](key, value if key == "stop" else _plain(value)) for key, value in sampling.items()
        }
        for name, check in self._checks.items():
            value = self._values(request, name) if name == "stop" else self._one(request, name, lambda _, value: value)
            if value is not None:
                if name in given:
                    raise InvalidInputError(name, value, "once: as an input or in sampling_parameters")
                given[name] = check(name, value)
        return SamplingParams(**given)

    def _sampling_parameters(self, request: InferenceRequest) -> dict[str, Any]:
        """The content of the input `sampling_parameters`. Raises InvalidInputError for an unknown key."""
        text = self._one(request, "sampling_parameters", _text)
        if not text:
            return {}
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError("sampling_parameters", text, f"JSON ({error})") from None
        if not isinstance(given, dict):
            raise InvalidInputError("sampling_parameters", text, "a JSON object")
        for key in given:
            if key not in self._checks and key not in self._request_parameters:
                known = sorted((*self._checks, *self._request_parameters))
                listed = f"{', '.join(known)}{hint(key, known)}"
                raise InvalidInputError(f"sampling_parameters {key}", given[key], f"unknown key; known: {listed}")
        # null means the default, as in vLLM.
        return {key: value for key, value in given.items() if value is not None}

    def _one(self, request: InferenceRequest, name: str, check: Callable[[str, Any], Any]) -> Any:
        values = self._values(request, name)
        if values is None:
            return None
        if len(values) != 1:
            raise InvalidInputError(name, f"{len(values)} values", "one value")
        return check(name, values[0])

    def _values(self, request: InferenceRequest, name: str) -> list[Any] | None:
        tensor = self._get(request, name)
        return None if tensor is None else list(tensor.as_numpy().reshape(-1).tolist())


def _plain(value: Any) -> Any:
    """A number or flag that was sent as text; some clients can send nothing else."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInputError(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidInputError(name, value, f"valid UTF-8 (byte {error.start} is not)") from None


def _stop(name: str, value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise InvalidInputError(name, value, "a text")
    text = _text(name, value)
    if not 1 <= len(text) <= _MAX_STOP_LENGTH:
        raise InvalidInputError(name, text, f"a text of 1 to {_MAX_STOP_LENGTH} characters")
    return text


def _stops(name: str, value: Any) -> tuple[str, ...]:
    texts = list_of(_stop)(name, [value] if isinstance(value, str) else value)
    if len(texts) > _MAX_STOPS:
        raise InvalidInputError(name, f"{len(texts)} texts", f"at most {_MAX_STOPS}")
    return tuple(texts)
