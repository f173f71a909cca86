"""The JSON field that holds a latency curve, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.policy import Check, Optional, list_of, number, record
from shapeshift.polymorph.curves import MD1, Affine, Clamped, Table

_POSITIVE = number(above=0)


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
