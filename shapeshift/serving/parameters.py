"""The request parameters that clients may send, checked and typed."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shapeshift.errors import InvalidInputError, did_you_mean, unknown
from shapeshift.serving.error_codes import FORWARDED
from shapeshift.serving.metrics import CHECKS

# Every front accepts these. `utility` weighs requests where a scheduler chooses by utility.
COMMON = ("latency_ms", "utility", "slo_class", "request_tag")
# Triton's own, which are ignored.
_TRITON_PREFIXES = ("triton_", "sequence_", "binary_data")
_TRITON_NAMES = ("priority", "timeout", "headers")
_MAX_TEXT = 256
FROM_NODE = "from_node"
"""With it a node of a fleet passes a request on, its own name the value. Such a request is not passed on again."""
CHECK = "check"
"""With it the sidecar asks what it knows the answer to: `right` or `wrong`, what it made of the answer before."""
_BETWEEN_MODELS = (FROM_NODE, FORWARDED, CHECK)
# Parameters that clients send to the wrong model, and the models that take them.
_ELSEWHERE = {
    "lora_name": "models with adapters: those of the backend adapter_cache, such as generate_lora, and text models of "
    "provider native whose config.pbtxt states adapter_mb"
}


def is_tritons(name: str) -> bool:
    """Whether a request parameter is Triton's own, which fronts ignore."""
    return name in _TRITON_NAMES or name.startswith(_TRITON_PREFIXES)


@dataclass(frozen=True)
class RequestParameters:
    """The parameters of a request; None for one that it does not give."""

    latency_ms: float | None = None
    utility: float | None = None
    task: str | None = None
    truncate: bool = False
    level: int | None = None
    min_accuracy: float | None = None
    lora_name: str | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    aggregation_strategy: str | None = None
    slo_class: str | None = None
    request_tag: str | None = None
    id: str | None = None
    forwarded: bool = False
    from_node: str | None = None
    checkpoint: str | None = None
    check: str | None = None


def parse(text: str, takes: Collection[str] = (), inputs: Collection[str] = ()) -> RequestParameters:
    """The parameters of one request, from `request.parameters()`.

    takes: the names that this front accepts beyond `COMMON`; inputs: those of the model, which HTTP's generate
    endpoints take from the same JSON object: a misspelled input arrives as a parameter.
    Raises InvalidInputError for an unknown name or a value of the wrong type.
    """
    if not text or text == "{}":
        return _NONE
    values_by_name: dict[str, Any] = json.loads(text)
    names = {*COMMON, *takes}
    values: dict[str, Any] = {}
    for name, value in values_by_name.items():
        if name in names or name in _BETWEEN_MODELS:
            values[name] = _CHECKS[name](name, value)
        elif not is_tritons(name):
            raise InvalidInputError(f"parameter {name}", value, unknown(hint(name, (*names, *inputs)), sorted(names)))
    return RequestParameters(**values)


def hint(name: str, names: Collection[str]) -> str:
    """A part of a refusal of the unknown `name`: which models take it, or the nearest of `names`."""
    return f"; {name} is for {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, names)


def joined(params: RequestParameters, named: Mapping[str, Any]) -> RequestParameters:
    """`params` with the parameters `named`, which the request gives elsewhere.

    Raises InvalidInputError for one that is given twice, or has the wrong type.
    """
    if not named:
        return params
    for name, value in named.items():
        if getattr(params, name) is not None:
            raise InvalidInputError(f"parameter {name}", value, "once: as a parameter or elsewhere in the request")
    checked: dict[str, Any] = {name: _CHECKS[name](name, value) for name, value in named.items()}
    return replace(params, **checked)


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if number <= 0:
        raise InvalidInputError(f"parameter {name}", value, "above 0")
    return number


def _number(name: str, value: Any) -> float:
    try:
        # HTTP clients that know only text send numbers as such.
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInputError(f"parameter {name}", value, "a finite number")
    return number


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if number != int(number) or number < 0:
        raise InvalidInputError(f"parameter {name}", value, "a whole number, 0 or more")
    return int(number)


def _tokens(name: str, value: Any) -> int:
    number = _number(name, value)
    if number != int(number) or not (number == -1 or number >= 1):
        raise InvalidInputError(f"parameter {name}", value, "a whole number, 1 or more, or -1 for what the model reads")
    return int(number)


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise InvalidInputError(f"parameter {name}", value, "true or false")


def _verdict(name: str, value: Any) -> str:
    if value not in CHECKS:
        raise InvalidInputError(f"parameter {name}", value, f"one of {', '.join(CHECKS)}")
    return str(value)


def _word(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_TEXT:
        raise InvalidInputError(f"parameter {name}", value, f"a text of 1 to {_MAX_TEXT} characters")
    return value


_CHECKS = {
    "latency_ms": _positive,
    "utility": _number,
    "task": _word,
    "truncate": _flag,
    "level": _whole,
    "min_accuracy": _number,
    "lora_name": _word,
    "prompt_name": _word,
    "truncate_prompt_tokens": _tokens,
    "aggregation_strategy": _word,
    "slo_class": _word,
    "request_tag": _word,
    "id": _word,
    FORWARDED: _flag,
    FROM_NODE: _word,
    "checkpoint": _word,
    CHECK: _verdict,
}
_NONE = RequestParameters()
