"""The inputs of a request for text, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode import input_checks
from shapeshift.fused_decode.declarations import INPUTS
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.serving.parameters import hint
from shapeshift.serving.pb_utils import InferenceRequest, PbUtils

RETURNS: Mapping[str, tuple[str, ...]] = {
    "return_finish_reason": ("finish_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_request_id": ("request_id",),
    "return_timings": ("queue_ms", "prefill_ms", "decode_ms"),
}
"""Inputs of type BOOL, and the outputs that each adds to the response."""
_TEXTS = ("stop", "bad_words")
_SEVERAL = {one.name for one in INPUTS if one.shape != "1"}


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
        self._checks = input_checks.sampling_checks(vocab_size)

    def stop_id(self, request: InferenceRequest) -> str | None:
        """The id of the request to end; None for a request for text. Raises InvalidInputError for both at once."""
        name: str | None = self._one(request, "stop_id", input_checks.text)
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
        stream = bool(self._one(request, "stream", input_checks.flag))
        echo = self._one(request, "exclude_input_in_output", input_checks.flag) is False
        if stream and echo:
            raise InvalidInputError("exclude_input_in_output", False, "true when stream is true")
        sampling = self._sampling_parameters(request)
        request_parameters = {key: sampling.pop(key) for key in self._request_parameters if key in sampling}
        returned = [outputs for name, outputs in RETURNS.items() if self._one(request, name, input_checks.flag)]
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
            key: self._checks[key](key, value if key in _TEXTS else input_checks.plain(value))
            for key, value in sampling.items()
        }
        for name, check in self._checks.items():
            value = (
                self._values(request, name) if name in _SEVERAL else self._one(request, name, lambda _, value: value)
            )
            if value is not None:
                if name in given:
                    raise InvalidInputError(name, value, "once: as an input or in sampling_parameters")
                given[name] = check(name, value)
        return SamplingParams(**given)

    def _sampling_parameters(self, request: InferenceRequest) -> dict[str, Any]:
        """The content of the input `sampling_parameters`. Raises InvalidInputError for an unknown key."""
        text = self._one(request, "sampling_parameters", input_checks.text)
        if not text:
            return {}
        given = input_checks.json_object("sampling_parameters", text)
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
