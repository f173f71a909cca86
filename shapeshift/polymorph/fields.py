"""Checks of the JSON fields that the policies of this technique share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.policy import Check, Optional, list_of, number
from shapeshift.polymorph.curves import MD1, Affine, Clamped, Table

_POSITIVE = number(above=0)


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise InvalidInputError(name, value, "true or false")
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


# The fields of a latency curve by its kind, after `kind` itself.
_CURVES: dict[str, tuple[dict[str, Check | Optional], Callable[..., Any]]] = {
    "affine": ({"l": _POSITIVE}, lambda kind, l: Affine(l)),  # noqa: E741
    "clamped": ({"l": _POSITIVE}, lambda kind, l: Clamped(l)),  # noqa: E741
    "table": ({"y": list_of(number(minimum=0), least=1)}, lambda kind, y: Table(tuple(y))),
    "md1": ({"l": _POSITIVE, "m": _POSITIVE}, lambda kind, l, m: MD1(l, m)),  # noqa: E741
}


def curve(name: str, value: Any) -> Any:
    """A latency curve: {"kind": affine | clamped | table | md1, and its parameters}."""
    kinds = ", ".join(_CURVES)
    if not isinstance(value, dict) or "kind" not in value:
        raise InvalidInputError(name, value, f"an object with a kind: {kinds}")
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in _CURVES:
        raise InvalidInputError(f"{name}.kind", kind, f"one of {kinds}")
    fields, build = _CURVES[kind]
    return record({"kind": lambda _, stated: stated, **fields}, build)(name, value)
