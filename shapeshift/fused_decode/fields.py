"""What a request asks for: inputs by name, or the keys of `sampling_parameters`, checked and typed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.sequence import GenerateParameters
from shapeshift.policy import Check, integer, list_of, number

_MOST_STOPS = 16
_LONGEST_STOP = 256

RETURNS: Mapping[str, tuple[str, ...]] = {
    "return_finish_reason": ("finish_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_request_id": ("request_id",),
    "return_timings": ("queue_ms", "prefill_ms", "decode_ms"),
}
"""Inputs of type BOOL, and the outputs that they ask for."""


@dataclass(frozen=True)
class GenerateFields:
    """A request as its inputs state it: the prompt in UTF-8, how to answer, and in which form.

    named  request parameters that stood in `sampling_parameters`, not checked yet
    """

    text: bytes
    parameters: GenerateParameters
    stream: bool
    echo: bool
    outputs: frozenset[str]
    named: Mapping[str, Any] = field(default_factory=dict)


class FieldReader:
    """Reads requests to one model. named: request parameters that may stand in `sampling_parameters` too."""

    def __init__(self, pb_utils: Any, vocabulary: int, named: Collection[str] = ()) -> None:
        self._get = pb_utils.get_input_tensor_by_name
        self._named = named
        self._checks: dict[str, Check] = {
            "max_tokens": integer(minimum=1),
            "temperature": number(minimum=0),
            "top_k": integer(minimum=-1, maximum=vocabulary),
            "top_p": number(above=0, maximum=1),
            "min_p": number(minimum=0, maximum=1),
            "repetition_penalty": number(above=0),
            "seed": integer(minimum=-(2**63), maximum=2**63 - 1),
            "stop": _stops,
            "ignore_eos": _flag,
        }

    def stop_id(self, request: Any) -> str | None:
        """The id that the request wants ended; None where it wants text. InvalidInputError where it wants both."""
        name: str | None = self._one(request, "stop_id", _text)
        if name is not None and self._get(request, "text_input") is not None:
            raise InvalidInputError("stop_id", name, "alone, without text_input")
        if name == "":
            raise InvalidInputError("stop_id", name, "the id of a request")
        return name

    def read(self, request: Any) -> GenerateFields:
        """The fields of a request for text. Raises InvalidInputError naming field, value and what is allowed."""
        prompt = self._one(request, "text_input", lambda name, value: value)
        if prompt is None:
            raise InvalidInputError("text_input", None, "this input is required")
        stream = bool(self._one(request, "stream", _flag))
        echo = self._one(request, "exclude_input_in_output", _flag) is False
        if stream and echo:
            raise InvalidInputError("exclude_input_in_output", False, "true when stream is true")
        sampling = self._sampling_parameters(request)
        named = {key: sampling.pop(key) for key in self._named if key in sampling}
        asked = [outputs for name, outputs in RETURNS.items() if self._one(request, name, _flag)]
        return GenerateFields(
            text=prompt.encode() if isinstance(prompt, str) else bytes(prompt),
            parameters=self._parameters(request, sampling),
            stream=stream,
            echo=echo,
            outputs=frozenset(output for outputs in asked for output in outputs),
            named=named,
        )

    def _parameters(self, request: Any, sampling: Mapping[str, Any]) -> GenerateParameters:
        given = {
            key: self._checks[key](key, value if key == "stop" else _plain(value)) for key, value in sampling.items()
        }
        for name, check in self._checks.items():
            value = self._values(request, name) if name == "stop" else self._one(request, name, lambda _, value: value)
            if value is not None:
                if name in given:
                    raise InvalidInputError(name, value, "once: as an input or in sampling_parameters")
                given[name] = check(name, value)
        return GenerateParameters(**given)

    def _sampling_parameters(self, request: Any) -> dict[str, Any]:
        """What `sampling_parameters` states, by known keys."""
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
            if key not in self._checks and key not in self._named:
                known = ", ".join(sorted((*self._checks, *self._named)))
                raise InvalidInputError(f"sampling_parameters {key}", given[key], f"unknown key; known: {known}")
        # null stands for the default, as it does for vLLM.
        return {key: value for key, value in given.items() if value is not None}

    def _one(self, request: Any, name: str, check: Callable[[str, Any], Any]) -> Any:
        values = self._values(request, name)
        if values is None:
            return None
        if len(values) != 1:
            raise InvalidInputError(name, f"{len(values)} values", "one value")
        return check(name, values[0])

    def _values(self, request: Any, name: str) -> list[Any] | None:
        tensor = self._get(request, name)
        return None if tensor is None else list(tensor.as_numpy().reshape(-1).tolist())


def _plain(value: Any) -> Any:
    """A number or flag that was sent as text, as clients do that know only text."""
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
    if not 1 <= len(text) <= _LONGEST_STOP:
        raise InvalidInputError(name, text, f"a text of 1 to {_LONGEST_STOP} characters")
    return text


def _stops(name: str, value: Any) -> tuple[str, ...]:
    texts = list_of(_stop)(name, [value] if isinstance(value, str) else value)
    if len(texts) > _MOST_STOPS:
        raise InvalidInputError(name, f"{len(texts)} texts", f"at most {_MOST_STOPS}")
    return tuple(texts)
