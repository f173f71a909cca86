"""Checks of single values of a request, by which `RequestParser` reads inputs and the keys of `sampling_parameters`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.declarations import (
    INPUTS,
    MAX_BAD_WORDS,
    MAX_BEAMS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_GRAMMAR,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    Input,
)
from shapeshift.fused_decode.sampling_params import NEVER, SamplingParams, StructuredOutputs
from shapeshift.policy_api import Check, integer, list_of, number


def sampling_checks(vocab_size: int) -> dict[str, Check]:
    """The check of each field of `SamplingParams`. vocab_size: tokens of the model."""
    token = integer(minimum=0, maximum=vocab_size - 1)
    own: Mapping[str, Check] = {
        "n": integer(minimum=1, maximum=MAX_CHOICES),
        "best_of": integer(minimum=1, maximum=MAX_CHOICES),
        "early_stopping": _early_stopping,
        "num_return_sequences": integer(minimum=1, maximum=MAX_BEAMS),
        "min_tokens": integer(minimum=0),
        "top_k": integer(minimum=-1, maximum=vocab_size),
        "logit_bias": _biases(vocab_size),
        "bad_words": _texts(MAX_BAD_WORDS),
        "seed": integer(minimum=-(2**63), maximum=2**63 - 1),
        "stop": _texts(MAX_STOPS),
        "stop_token_ids": _several(token, MAX_STOP_IDS, "ids"),
        "structured_outputs": _structured,
    }
    named = {one.name: one for one in INPUTS}
    return {one.name: own.get(one.name) or _of(named[one.name]) for one in fields(SamplingParams)}


def plain(value: Any) -> Any:
    """A number, flag, list or object that was sent as text; some clients can send nothing else."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def flag(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise InvalidInputError(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    """Text, given as such or as UTF-8."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidInputError(name, value, f"valid UTF-8 (byte {error.start} is not)") from None


def json_object(name: str, value: Any) -> dict[str, Any]:
    """A JSON object, given as such or as text."""
    if not isinstance(value, dict):
        given = text(name, value)
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(name, given, f"JSON ({error})") from None
        if not isinstance(value, dict):
            raise InvalidInputError(name, given, "a JSON object")
    return value


def _of(declared: Input) -> Check:
    """The check that the declaration of a flag or a number states."""
    if declared.kind == "BOOL":
        return flag
    assert declared.least is not None
    if declared.kind == "FP32":
        return number(minimum=declared.least, maximum=math.inf if declared.most is None else declared.most)
    return integer(minimum=int(declared.least), maximum=None if declared.most is None else int(declared.most))


def _early_stopping(name: str, value: Any) -> bool | str:
    """true, false or never; an input of type BYTES says true and false as text."""
    given = text(name, value) if isinstance(value, str | bytes) else value
    for said, meant in (("true", True), ("false", False), (NEVER, NEVER)):
        if given is meant or given == said:
            return meant
    raise InvalidInputError(name, given, "true, false or never")


def _word(name: str, value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise InvalidInputError(name, value, "a text")
    found = text(name, value)
    if not 1 <= len(found) <= MAX_STOP_LENGTH:
        raise InvalidInputError(name, found, f"a text of 1 to {MAX_STOP_LENGTH} characters")
    return found


def _texts(most: int) -> Check:
    several = _several(_word, most, "texts")
    return lambda name, value: several(name, [value] if isinstance(value, str) else value)


def _several(check: Check, most: int, what: str) -> Check:
    def check_all(name: str, value: Any) -> tuple[Any, ...]:
        found = list_of(check)(name, value)
        if len(found) > most:
            raise InvalidInputError(name, f"{len(found)} {what}", f"at most {most}")
        return tuple(found)

    return check_all


def _biases(vocab_size: int) -> Check:
    token, bias = integer(minimum=0, maximum=vocab_size - 1), number(minimum=-MAX_BIAS, maximum=MAX_BIAS)

    def check(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        given = json_object(name, value)
        if len(given) > MAX_BIASES:
            raise InvalidInputError(name, f"{len(given)} tokens", f"at most {MAX_BIASES}")
        return tuple((token(f"{name} token", plain(key)), bias(f"{name} {key}", one)) for key, one in given.items())

    return check


_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def _structured(name: str, value: Any) -> StructuredOutputs:
    """vLLM's object: one of `_KINDS`; what else it may hold is refused unless it has no effect."""
    given = {key: one for key, one in json_object(name, value).items() if one not in (None, False)}
    compact = given.pop("disable_any_whitespace", False)
    if len(given) != 1 or not {*given} <= {*_KINDS}:
        raise InvalidInputError(name, sorted(given), f"one of {', '.join(_KINDS)}")
    ((kind, content),) = given.items()
    field = f"{name} {kind}"
    if kind == "json_object":
        kind, content = "json", {"type": "object"}
    if kind == "choice":
        words = list_of(_word, min_length=1)(field, content)
        content = json.dumps(words)
    elif kind == "json" and not isinstance(content, str):
        content = json.dumps(content)
    if not isinstance(content, str):
        raise InvalidInputError(field, content, "a text")
    if len(content) > MAX_GRAMMAR:
        raise InvalidInputError(field, f"{len(content)} characters", f"at most {MAX_GRAMMAR}")
    return StructuredOutputs(kind, content, flag("disable_any_whitespace", compact))
