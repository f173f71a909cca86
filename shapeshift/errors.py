"""What can go wrong, as types. `serving.replies` maps each one to a Triton error code."""

from __future__ import annotations


class ShapeshiftError(Exception):
    """Base of every error this project raises on purpose; its text is written for the user."""


class InvalidInputError(ShapeshiftError):
    """A request, setting or file that cannot be meant. Names the field, the value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str, row: int | None = None) -> None:
        where = "" if row is None else f"row {row}: "
        super().__init__(f"{where}{field}: got {_short(value)}; {allowed}")
        self.field = field
        self.row = row


class NotFoundError(ShapeshiftError):
    """A name that nothing is registered under."""


class OverloadedError(ShapeshiftError):
    """A full queue or a deadline that has passed: the caller may try again later or elsewhere."""


class UnsupportedError(ShapeshiftError):
    """Something that this server, machine or model cannot do."""


class EngineError(ShapeshiftError):
    """An engine that cannot be built, verified, loaded or run."""


class CancelledRequestError(ShapeshiftError):
    """The caller went away before its answer was computed."""


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
