"""The inputs of a request for text, read and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.declarations import INPUTS, MAX_CHOICES, MAX_PROMPTS
from shapeshift.fused_decode.sampling_params import SamplingParams, flag, json_object, plain, sampling_checks, text
from shapeshift.serving.parameters import hint
from shapeshift.serving.pb_utils import InferenceRequest, PbUtils

Ids = npt.NDArray[np.int64]

TEXT = "text_output"
RETURNS: Mapping[str, tuple[str, ...]] = {
    "return_finish_reason": ("finish_reason", "stop_reason"),
    "return_num_input_tokens": ("num_input_tokens", "num_cached_tokens"),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_token_ids": ("token_ids", "prompt_token_ids"),
    "return_logprobs": ("logprobs",),
    "return_request_id": ("request_id",),
    "return_timings": ("queue_ms", "prefill_ms", "decode_ms"),
}
"""Inputs of type BOOL, and the outputs that each adds to the response."""
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "logprobs": ("token_logprobs", "top_token_ids", "top_logprobs"),
    "prompt_logprobs": ("prompt_logprobs",),
}
"""Parameters that add outputs where they are given."""
# Parameters of other servers that a request may have with these values, which say what this one does.
_NEUTRAL: Mapping[str, Any] = {
    "top_logprobs": 0,
    "suffix": "",
    "use_beam_search": False,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
}
# Of English text, with the tokenizers of current models.
_BYTES_PER_TOKEN = 4.0
_PROMPTS = ("text_input", "input_ids", "input_lengths")
_TEXTS = ("stop", "bad_words")
# How a prompt is read, and how an answer is written, not how it is made.
_ADDS, _SKIPS = "add_special_tokens", "skip_special_tokens"
_SEVERAL = {one.name for one in INPUTS if one.shape != "1"}


@dataclass(frozen=True)
class ParsedRequest:
    """The inputs of one request.

    prompts             in UTF-8, or INT64 [tokens]
    add_special_tokens  whether the tokenizer puts its special tokens around texts
    skip_special_tokens  whether an answer's text leaves special tokens out
    echo                whether the answer begins with the prompt
    outputs             outputs that the answer carries
    request_parameters  request parameters that the input `sampling_parameters` holds, not checked yet
    """

    prompts: Sequence[bytes | Ids]
    add_special_tokens: bool
    skip_special_tokens: bool
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
        self._vocab_size = vocab_size
        self._request_parameters = request_parameters
        self._checks = sampling_checks(vocab_size)

    def stop_id(self, request: InferenceRequest) -> str | None:
        """The id of the request to end; None for a request for text. Raises InvalidInputError for both at once."""
        name: str | None = self._one(request, "stop_id", text)
        if name is not None and (others := [one for one in _PROMPTS if self._get(request, one) is not None]):
            raise InvalidInputError("stop_id", name, f"alone, without {others[0]}")
        if name == "":
            raise InvalidInputError("stop_id", name, "the id of a request")
        return name

    def prompt_tokens(self, request: InferenceRequest) -> float:
        """About how many tokens the prompts have, before they are checked: exact for `input_ids`."""
        ids, texts = self._get(request, "input_ids"), self._get(request, "text_input")
        if ids is not None:
            return float(ids.as_numpy().size)
        rows = [] if texts is None else texts.as_numpy().reshape(-1).tolist()
        return sum(len(row) for row in rows if isinstance(row, bytes)) / _BYTES_PER_TOKEN

    def parse(self, request: InferenceRequest) -> ParsedRequest:
        """The inputs of a request for text. Raises InvalidInputError naming the input, its value and the limit."""
        prompts = self.prompts(request)
        stream = bool(self._one(request, "stream", flag))
        echo = self._one(request, "exclude_input_in_output", flag) is False
        if stream and echo:
            raise InvalidInputError("exclude_input_in_output", False, "true when stream is true")
        sampling = self._sampling_parameters(request)
        adds = flag(_ADDS, plain(sampling.pop(_ADDS, True)))
        skips = flag(_SKIPS, plain(sampling.pop(_SKIPS, True)))
        if (as_input := self._one(request, _ADDS, flag)) is not None:
            adds = as_input
        request_parameters = {key: sampling.pop(key) for key in self._request_parameters if key in sampling}
        returned = [outputs for name, outputs in RETURNS.items() if self._one(request, name, flag)]
        params = self._sampling_params(request, sampling)
        if stream:
            _require_streamable(params)
        for name in ("num_beams", "n" if params.best_of is None else "best_of"):
            if len(prompts) * (rows := getattr(params, name)) > MAX_CHOICES:
                raise InvalidInputError(name, rows, f"at most {MAX_CHOICES} with all {len(prompts)} prompts")
        returned += [outputs for name, outputs in NUMBERS.items() if getattr(params, name) is not None]
        if params.num_beams > 1:
            returned.append(("sequence_score",))
        if len(prompts) * params.choices > 1:
            returned.append(("choice_index",))
        return ParsedRequest(
            prompts=prompts,
            add_special_tokens=adds,
            skip_special_tokens=skips,
            sampling_params=params,
            stream=stream,
            echo=echo,
            outputs=frozenset({TEXT, *(output for outputs in returned for output in outputs)}),
            request_parameters=request_parameters,
        )

    def prompts(self, request: InferenceRequest) -> Sequence[bytes | Ids]:
        """The prompts, as texts or as tokens. Raises InvalidInputError."""
        texts, ids, lengths = (self._values(request, name) for name in _PROMPTS)
        if ids is None:
            if texts is None:
                raise InvalidInputError("text_input", None, "this input or input_ids is required")
            if lengths is not None:
                raise InvalidInputError("input_lengths", lengths, "given with input_ids alone")
            prompts: list[bytes | Ids] = [one.encode() if isinstance(one, str) else bytes(one) for one in texts]
        else:
            if texts is not None:
                raise InvalidInputError("input_ids", ids, "one of text_input and input_ids, not both")
            prompts = [*self._divided(ids, [len(ids)] if lengths is None else lengths)]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            name = "text_input" if ids is None else "input_lengths"
            raise InvalidInputError(name, f"{len(prompts)} prompts", f"1 to {MAX_PROMPTS}")
        return prompts

    def _divided(self, ids: list[int], lengths: list[int]) -> list[Ids]:
        """The prompts of these lengths."""
        if any(length < 1 for length in lengths) or sum(lengths) != len(ids):
            raise InvalidInputError("input_lengths", lengths, f"numbers of at least 1 with the sum {len(ids)}")
        wrong = [token for token in ids if not 0 <= token < self._vocab_size]
        if wrong:
            raise InvalidInputError("input_ids", wrong[0], f"0 to {self._vocab_size - 1}")
        return np.split(np.array(ids, np.int64), np.cumsum(lengths)[:-1])

    def _sampling_params(self, request: InferenceRequest, sampling: Mapping[str, Any]) -> SamplingParams:
        values = {
            key: self._checks[key](key, value if key in _TEXTS else plain(value)) for key, value in sampling.items()
        }
        for name, check in self._checks.items():
            value = (
                self._values(request, name) if name in _SEVERAL else self._one(request, name, lambda _, value: value)
            )
            if value is not None:
                if name in values:
                    raise InvalidInputError(name, value, "once: as an input or in sampling_parameters")
                values[name] = check(name, value)
        return SamplingParams(**values)

    def _sampling_parameters(self, request: InferenceRequest) -> dict[str, Any]:
        """The content of the input `sampling_parameters`. Raises InvalidInputError for an unknown key."""
        content = self._one(request, "sampling_parameters", text)
        if not content:
            return {}
        sampling = json_object("sampling_parameters", content)
        for key, value in _NEUTRAL.items():
            if (other := sampling.pop(key, None)) not in (None, value):
                raise InvalidInputError(f"sampling_parameters {key}", other, f"{json.dumps(value)}, or left out")
        # Its name in older releases of vLLM, which Triton's OpenAI frontend sends.
        if "guided_decoding" in sampling:
            sampling.setdefault("structured_outputs", sampling.pop("guided_decoding"))
        # As OpenAI's chat API has it.
        if isinstance(sampling.get("logprobs"), bool):
            sampling["logprobs"] = 0 if sampling["logprobs"] else None
        names = sorted((*self._checks, _ADDS, _SKIPS, *self._request_parameters))
        for key in sampling:
            if key not in names:
                listed = f"{', '.join(names)}{hint(key, names)}"
                raise InvalidInputError(f"sampling_parameters {key}", sampling[key], f"unknown key; known: {listed}")
        # null means the default, as in vLLM.
        return {key: value for key, value in sampling.items() if value is not None}

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


def _require_streamable(params: SamplingParams) -> None:
    """Raise InvalidInputError where the text of an answer is not known before its end."""
    if params.num_beams > 1:
        raise InvalidInputError("num_beams", params.num_beams, "1 when stream is true")
    if params.samples > params.n:
        raise InvalidInputError("best_of", params.best_of, f"n ({params.n}) when stream is true")
