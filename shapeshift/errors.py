"""The error types of the project. `serving.error_codes` maps each one to a Triton error code."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath

NO_ADAPTER = 3
"""The exit status of `shapeshift adapters` for a name that its registry does not have."""
_PATH = re.compile(r"\.{0,2}/.*")


class ShapeshiftError(Exception):
    """Base of every error that this project raises. Its text is written for the user."""


class InvalidInputError(ShapeshiftError):
    """An invalid request, setting or file. The text names the field, the value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str, row: int | None = None) -> None:
        where = "" if row is None else f"row {row}: "
        super().__init__(f"{where}{field}: got {_short(value)}; {allowed}")
        self.field = field
        self.row = row


class NotFoundError(ShapeshiftError):
    """A name under which nothing is registered."""


class OverloadedError(ShapeshiftError):
    """A full queue or an expired deadline. The caller may retry later or on another server."""


class TimedOutError(OverloadedError):
    """Another model or server gave no answer within its time."""


class UnsupportedError(ShapeshiftError):
    """A feature that this server, machine or model does not support."""


class EngineError(ShapeshiftError):
    """An engine cannot be built, verified, loaded or run."""


class CancelledRequestError(ShapeshiftError):
    """The caller cancelled the request before its response was computed."""


class ModelGoneError(ShapeshiftError):
    """Another model is not loaded, or is being replaced."""


class ModelDiedError(ShapeshiftError):
    """The process of another model has died; the model serves nothing until it is loaded again."""


class ModelError(ShapeshiftError):
    """The error that another model answered with: its text, and `code`, the name of its Triton code."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A part of an error text that names the one of `candidates` nearest to `name`; empty where none is near."""
    near = difflib.get_close_matches(name, list(candidates), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def unknown(near: str, names: Iterable[str]) -> str:
    """What is wrong with an unknown parameter. near: the likely mend as `did_you_mean` says it, which comes first."""
    return f"unknown parameter{near}{'' if near.endswith('?') else ';'} known: {', '.join(names)}"


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _short(value: object, limit: int = 80) -> str:
    """`value` as an error text shows it: at most `limit` characters, of a path the last ones."""
    text = repr(str(value) if isinstance(value, PurePath) else value)
    if len(text) <= limit:
        return text
    is_path = isinstance(value, PurePath) or (isinstance(value, str) and _PATH.fullmatch(value) is not None)
    return f"{text[0]}…{text[2 - limit :]}" if is_path else f"{text[: limit - 1]}…"
