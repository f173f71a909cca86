"""How long a text becomes that a function of Jinja or Python makes, known before it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shapeshift.gateway.chat_templates import limits

# MODULO: the operator, and the filter `format`.
_REPLACE, MODULO = "replace", "%"
# Before what a function puts one of its arguments, and the least width of that; an empty mark stands for any place.
_MARKS = {
    "format": ("{", 999),
    "format_map": ("{", 999),
    MODULO: ("%", 999),
    "expandtabs": ("\t", 8),
    "indent": ("\n", 4),
    "translate": ("", 0),
    "wordwrap": ("", 0),
    "urlize": ("", 0),
}
# Numbers given to these are as many spaces.
_SPACED = ("expandtabs", "indent")


def require_makes_little(name: str, value: Any, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Of the function or filter `name`, called with `value` and these arguments. Raises TemplateLimitError."""
    if name != _REPLACE and name not in _MARKS:
        return
    limits.require_length(limits.characters(value))
    text = str(value)
    if name == _REPLACE:
        by_name = {**dict(zip(("old", "new"), given, strict=False)), **named}
        old, new = (by_name.get(one, "") for one in ("old", "new"))
        limits.require_length(len(text) + text.count(str(old)) * limits.characters(new))
        return
    mark, least = _MARKS[name]
    arguments = [one for one in (*given, *named.values()) if name in _SPACED or not isinstance(one, int)]
    longest = max(map(_longest, arguments), default=0)
    limits.require_length(len(text) + text.count(mark) * max(longest, least))


def joined(separator: Any, values: Any) -> list[Any]:
    """`values`, which `separator` is about to join. Raises TemplateLimitError."""
    found = list(values)
    limits.require_length(limits.characters(found) + limits.characters(separator) * len(found))
    return found


def _longest(value: Any) -> int:
    """Characters of the longest text that an argument gives; a number gives as many spaces."""
    if isinstance(value, int):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return max(map(limits.characters, value), default=0)
    return limits.characters(value)
