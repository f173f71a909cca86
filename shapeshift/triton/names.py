"""Names of models. They are checked here because Triton's model control has run code from unchecked names.

In a fleet a model of a node is named `node/model`.
"""

from __future__ import annotations

import re

from shapeshift.errors import InvalidInputError

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_WORKER = re.compile(r"(.+)_w[0-9]{2,}")
_MAX_LENGTH = 128
_SEPARATOR = "/"


def check_model_name(name: str) -> str:
    """`name` itself. Raises InvalidInputError unless it is letters, digits, `_`, `-` and single dots, at most 128."""
    if len(name) > _MAX_LENGTH or not _MODEL_NAME.fullmatch(name):
        raise InvalidInputError(
            "model", name, f"must be letters, digits, _, - and single dots between them, at most {_MAX_LENGTH}"
        )
    return name


def worker_front(name: str) -> str | None:
    """The front of the worker model `name`: `encode` for `encode_w00`; None if it is not a worker name."""
    match = _WORKER.fullmatch(name)
    return match[1] if match else None


def qualified(node: str, model: str) -> str:
    """The name of a node's model in the fleet: `node/model`; `model` itself if the node is empty."""
    return f"{node}{_SEPARATOR}{model}" if node else model


def split(name: str) -> tuple[str, str]:
    """Node and model of a qualified name; the node is empty for a model of one's own server."""
    node, _, model = name.rpartition(_SEPARATOR)
    return node, model
