"""Valid model names. Names are checked here because Triton's model control has run code from unchecked names."""

from __future__ import annotations

import re

from shapeshift.errors import InvalidInputError

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_WORKER = re.compile(r"(.+)_w[0-9]{2,}")
_MAX_LENGTH = 128


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
