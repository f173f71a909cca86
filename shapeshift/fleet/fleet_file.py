"""Writes fleet files: what `settings.read` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable

from shapeshift.fleet.node import Node
from shapeshift.triton.endpoint import Tls


def text(name: str, tls: Tls | None, nodes: Iterable[Node]) -> str:
    """A fleet file with membership `static`. Paths are written as they are."""
    parts = [_values({"name": name})]
    if tls is not None:
        parts.append("[tls]\n" + _values({"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}))
    for node in nodes:
        key = {} if node.key_file is None else {"key_file": node.key_file}
        own = {"name": node.name, "grpc": node.grpc.address, "metrics": node.metrics, **key}
        parts.append("[[nodes]]\n" + _values(own))
    return "\n".join(parts)


def _values(values: dict[str, object]) -> str:
    # A JSON string is a basic string of TOML.
    return "".join(f"{name} = {json.dumps(str(value), ensure_ascii=False)}\n" for name, value in values.items())
