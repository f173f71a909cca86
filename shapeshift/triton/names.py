"""Which model names may reach the server: its model control API has run code from names it did not check."""

from __future__ import annotations

import re

from shapeshift.errors import InvalidInputError

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_WORKER = re.compile(r"(.+)_w[0-9]{2,}")
_LONGEST = 128


def check_model_name(name: str) -> str:
    """`name` itself, or InvalidInputError: letters, digits, `_`, `-` and single dots, at most 128."""
    if len(name) > _LONGEST or not _MODEL_NAME.fullmatch(name):
        raise InvalidInputError(
            "model", name, f"must be letters, digits, _ and - with single dots between, at most {_LONGEST}"
        )
    return name


def worker_front(name: str) -> str | None:
    """The front that a model with this name works for, if it is a worker's: `encode` for `encode_w00`; else None."""
    match = _WORKER.fullmatch(name)
    return match[1] if match else None
