"""Policies by hand: the JSON face of every decision function.

A technique lists its policies in a table POLICIES of `Policy` records. A policy's fields are checked
before its function is called, so that the function itself stays free of parsing. Exact numbers and lists
only: a bool is not a number, and NaN and infinities are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shapeshift.errors import InvalidInputError

Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Optional:
    """A field that may be left out."""

    check: Check
    default: Any


@dataclass(frozen=True)
class Policy:
    """One decision: `decide` takes the checked fields as keyword arguments and returns a JSON object.

    With `algorithms`, the input may name one (default: the first) and the answer always does.
    """

    name: str
    summary: str
    decide: Callable[..., dict[str, Any]]
    fields: Mapping[str, Check | Optional]
    algorithms: tuple[str, ...] = field(default=())

    def answer(self, given: Any) -> dict[str, Any]:
        """The decision for one input object. Raises InvalidInputError naming the offending field."""
        if not isinstance(given, dict):
            raise InvalidInputError("input", given, "a JSON object")
        checks = dict(self.fields)
        if self.algorithms:
            checks["algorithm"] = Optional(one_of(*self.algorithms), self.algorithms[0])
        for key in given:
            if key not in checks:
                raise InvalidInputError(key, given[key], f"unknown key; known: {', '.join(checks)}")
        values = {name: _take(name, check, given) for name, check in checks.items()}
        try:
            answer = self.decide(**values)
        except (ValueError, OverflowError) as error:
            raise InvalidInputError("input", given, str(error)) from error
        return {**answer, "algorithm": values["algorithm"]} if self.algorithms else answer


def _take(name: str, check: Check | Optional, given: Mapping[str, Any]) -> Any:
    if isinstance(check, Optional):
        return check.check(name, given[name]) if name in given else check.default
    if name not in given:
        raise InvalidInputError(name, None, "this key is required")
    return check(name, given[name])


def number(minimum: float = -math.inf, maximum: float = math.inf, above: float = -math.inf) -> Check:
    """A finite number within [minimum, maximum] and greater than `above`."""
    parts = [
        f"{word} {bound:g}"
        for word, bound in (("at least", minimum), ("at most", maximum), ("above", above))
        if math.isfinite(bound)
    ]
    allowed = "a number" + (" " + " and ".join(parts) if parts else "")

    def check(name: str, value: Any) -> float:
        usable = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        if not usable or not minimum <= value <= maximum or value <= above:
            raise InvalidInputError(name, value, allowed)
        return float(value)

    return check


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of float
        return False


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    """A whole number within [minimum, maximum]."""
    bounds = [f"at least {minimum}"] * (minimum is not None) + [f"at most {maximum}"] * (maximum is not None)
    allowed = "a whole number" + (" " + " and ".join(bounds) if bounds else "")

    def check(name: str, value: Any) -> int:
        usable = isinstance(value, int) and not isinstance(value, bool)
        too_small = usable and minimum is not None and value < minimum
        too_large = usable and maximum is not None and value > maximum
        if not usable or too_small or too_large:
            raise InvalidInputError(name, value, allowed)
        return int(value)

    return check


def list_of(check: Check, least: int = 0) -> Check:
    """A list of at least `least` values that pass `check`."""

    def check_list(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) < least:
            raise InvalidInputError(name, value, f"a list of at least {least} values" if least else "a list")
        return [check(f"{name}[{index}]", item) for index, item in enumerate(value)]

    return check_list


def one_of(*options: str) -> Check:
    """One of the given words."""

    def check(name: str, value: Any) -> str:
        if value not in options:
            raise InvalidInputError(name, value, f"one of {', '.join(options)}")
        return str(value)

    return check


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise InvalidInputError(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise InvalidInputError(name, value, "a text")
    return value


def identity(name: str, value: Any) -> int | str:
    """A whole number or a string."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidInputError(name, value, "a whole number or a string")
    return value


def nullable(check: Check) -> Check:
    """null, or what passes `check`."""
    return lambda name, value: None if value is None else check(name, value)


def record(fields: Mapping[str, Check | Optional], build: Callable[..., Any]) -> Check:
    """An object with these keys and no others; `build` gets their values as keyword arguments."""

    def check_record(name: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise InvalidInputError(name, value, f"an object with the keys {', '.join(fields)}")
        for key in value:
            if key not in fields:
                raise InvalidInputError(f"{name}.{key}", value[key], f"unknown key; known: {', '.join(fields)}")
        values = {}
        for key, check in fields.items():
            if key in value:
                values[key] = (check.check if isinstance(check, Optional) else check)(f"{name}.{key}", value[key])
            elif isinstance(check, Optional):
                values[key] = check.default
            else:
                raise InvalidInputError(f"{name}.{key}", None, "this key is required")
        return build(**values)

    return check_record
