"""Which model names may reach the server: its model control API has run code from names it did not check."""

from __future__ import annotations

import re

from shapeshift.errors import InvalidInputError

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_LONGEST = 128


def check_model_name(name: str) -> str:
    """`name` itself, or InvalidInputError: letters, digits, `_`, `-` and single dots, at most 128."""
    if len(name) > _LONGEST or not _MODEL_NAME.fullmatch(name):
        raise InvalidInputError(
            "model", name, f"must be letters, digits, _ and - with single dots between, at most {_LONGEST}"
        )
    return name
