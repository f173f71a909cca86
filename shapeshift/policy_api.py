"""The JSON API of decision functions: `shapeshift policy`.

A technique lists its policies in a tuple POLICIES of `Policy` records. A policy checks its input fields before it calls
the decision function, which therefore parses nothing. Types are exact: a bool is not a number, and NaN and infinities
are invalid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shapeshift.errors import InvalidInputError

Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class OptionalField:
    """A field with a default."""

    check: Check
    default: Any


@dataclass(frozen=True)
class Policy:
    """One decision function: `decide` takes the checked fields as keyword arguments and returns a JSON object.

    If there are `algorithms`, the input may name one (default: the first) and the result names the one used.
    """

    name: str
    summary: str
    decide: Callable[..., dict[str, Any]]
    fields: Mapping[str, Check | OptionalField]
    algorithms: tuple[str, ...] = field(default=())

    def evaluate(self, data: Any) -> dict[str, Any]:
        """The decision for one input object. Raises InvalidInputError naming the invalid field."""
        if not isinstance(data, dict):
            raise InvalidInputError("input", data, "a JSON object")
        fields = dict(self.fields)
        if self.algorithms:
            fields["algorithm"] = OptionalField(one_of(*self.algorithms), self.algorithms[0])
        values = _read(fields, data)
        try:
            result = self.decide(**values)
        except (ValueError, OverflowError) as error:
            raise InvalidInputError("input", data, str(error)) from error
        return {**result, "algorithm": values["algorithm"]} if self.algorithms else result


def _read(fields: Mapping[str, Check | OptionalField], data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The checked values of all `fields`. Errors name a field by `prefix` and its key."""
    for key in data:
        if key not in fields:
            raise InvalidInputError(prefix + key, data[key], f"unknown key; known: {', '.join(fields)}")
    values = {}
    for key, check in fields.items():
        if key in data:
            values[key] = (check.check if isinstance(check, OptionalField) else check)(prefix + key, data[key])
        elif isinstance(check, OptionalField):
            values[key] = check.default
        else:
            raise InvalidInputError(prefix + key, None, "this key is required")
    return values


def number(minimum: float = -math.inf, maximum: float = math.inf, above: float = -math.inf) -> Check:
    """A finite number within [minimum, maximum] and greater than `above`."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", minimum), ("at most", maximum), ("above", above))
        if math.isfinite(bound)
    ]
    allowed = "a number" + (" " + " and ".join(bounds) if bounds else "")

    def check(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        if not is_number or not minimum <= value <= maximum or value <= above:
            raise InvalidInputError(name, value, allowed)
        return float(value)

    return check


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of float
        return False


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    """A whole number within [minimum, maximum]."""
    bounds = [f"at least {minimum}"] * (minimum is not None) + [f"at most {maximum}"] * (maximum is not None)
    allowed = "a whole number" + (" " + " and ".join(bounds) if bounds else "")

    def check(name: str, value: Any) -> int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        too_small = is_integer and minimum is not None and value < minimum
        too_large = is_integer and maximum is not None and value > maximum
        if not is_integer or too_small or too_large:
            raise InvalidInputError(name, value, allowed)
        return int(value)

    return check


def list_of(check: Check, min_length: int = 0) -> Check:
    """A list of at least `min_length` values that pass `check`."""

    def check_list(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) < min_length:
            raise InvalidInputError(name, value, f"a list of at least {min_length} values" if min_length else "a list")
        return [check(f"{name}[{index}]", item) for index, item in enumerate(value)]

    return check_list


def one_of(*options: str) -> Check:
    """One of the strings `options`."""

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


def identifier(name: str, value: Any) -> int | str:
    """A whole number or a string."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidInputError(name, value, "a whole number or a string")
    return value


def nullable(check: Check) -> Check:
    """null, or a value that passes `check`."""
    return lambda name, value: None if value is None else check(name, value)


def record(fields: Mapping[str, Check | OptionalField], build: Callable[..., Any]) -> Check:
    """An object with these keys and no others, passed to `build` as keyword arguments."""

    def check_record(name: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise InvalidInputError(name, value, f"an object with the keys {', '.join(fields)}")
        return build(**_read(fields, value, f"{name}."))

    return check_record
