"""Values that stand between tags, as JSON: what the schema of the arguments types them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

# What a JSON schema may consist of.
_OPTIONS = ("anyOf", "oneOf", "allOf")
# A tag and the text behind it, and how deep they may nest.
_TAG = re.compile(r"<(?P<closes>/?)(?P<name>[^<>]+)>(?P<text>.*)", re.DOTALL)
_DEEPEST = 64
_Children = list[tuple[str, tuple[str, "_Children"]]]


def types_of_each(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The types that each parameter may have; of one whose schema names none, a text."""
    properties = schema.get("properties")
    return (
        {name: _types_of(one, schema) or ("string",) for name, one in properties.items()}
        if isinstance(properties, Mapping)
        else {}
    )


def elements(text: str, mark: str, schema: Mapping[str, Any]) -> str | None:
    """The arguments that elements make, with `mark` before each tag; None where tags do not fit, or nest too deep.

    What a list holds are elements `item`. A text is read as the schema types it; below the arguments, where no schema
    does, as JSON if it is.
    """
    root = _element(text.split(mark))
    if root is None:
        return None
    members = []
    for name, one in root:
        typed = _of_name(schema, schema, name)
        # As of other forms.
        typed = typed if one[1] or _types_of(typed, schema) else {"type": "string"}
        members.append(f"{json.dumps(name)}: {_json_of(one, typed, schema)}")
    return f"{{{', '.join(members)}}}"


def value(text: str, types: Sequence[str]) -> str:
    """The JSON of a value: what it says where its types allow for more than texts."""
    if "string" not in types or (text.strip() == "null" and "null" in types):
        try:
            return orjson.dumps(orjson.loads(text)).decode()
        # Some values nest too deep to be written.
        except (orjson.JSONDecodeError, TypeError):
            pass
        try:
            return orjson.dumps(ast.literal_eval(text.strip())).decode()
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _element(parts: Sequence[str]) -> _Children | None:
    """What the tags, and the text behind each, make; None where they do not fit each other, or nest too deep."""
    root: _Children = []
    open_ones: list[tuple[str, _Children]] = [("", root)]
    for part in parts[1:]:
        match = _TAG.fullmatch(part)
        if match is None or len(open_ones) > _DEEPEST:
            return None
        name, text, inner = match["name"], match["text"], open_ones[-1]
        if not match["closes"]:
            children: _Children = []
            inner[1].append((name, (text, children)))
            open_ones.append((name, children))
        elif len(open_ones) < 2 or open_ones.pop()[0] != name:
            return None
    return root if len(open_ones) == 1 and not parts[0].strip() else None


def _json_of(element: tuple[str, _Children], schema: Any, root: Any) -> str:
    """The JSON of an element: its text, or what is in it."""
    text, children = element
    types = _types_of(schema, root)
    is_list = "array" in types or (not types and {name for name, _ in children} == {"item"})
    if children and is_list:
        items: Any = next((part["items"] for part in _parts(schema, root) if "items" in part), {})
        return f"[{', '.join(_json_of(one, items, root) for _, one in children)}]"
    if children:
        members = {name: _json_of(one, _of_name(schema, root, name), root) for name, one in children}
        return f"{{{', '.join(f'{json.dumps(name)}: {member}' for name, member in members.items())}}}"
    empty = "[]" if "array" in types else "{}" if "object" in types else ""
    return empty if empty and not text.strip() else value(text, types)


def _of_name(schema: Any, root: Any, name: str) -> Any:
    """The schema of a property."""
    stands = (part["properties"] for part in _parts(schema, root) if isinstance(part.get("properties"), Mapping))
    return next((properties[name] for properties in stands if name in properties), {})


def _parts(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """The schema, and those that it consists of or refers to, of which `root` is the whole."""
    parts, seen = [schema], set()
    while parts:
        part = parts.pop()
        # Schemas may refer to themselves.
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(pointer := part.get("$ref"), str):
            parts.append(_pointed_at(pointer, root))
        for name in _OPTIONS:
            parts += options if isinstance(options := part.get(name), list) else ()


def _types_of(schema: Any, root: Any) -> tuple[str, ...]:
    """The types that a part of the schema `root` may have."""
    types: list[str] = []
    for part in _parts(schema, root):
        names = part.get("type")
        types += [names] if isinstance(names, str) else map(str, names) if isinstance(names, list) else ()
    return tuple(types)


def _pointed_at(pointer: str, root: Any) -> Any:
    """What a reference within the schema `root` leads to; None: to nothing there."""
    for name in pointer.removeprefix("#/").split("/") if pointer.startswith("#/") else ():
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root if pointer.startswith("#") else None
