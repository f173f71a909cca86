"""One table from our error types to Triton's codes, and error replies made with it."""

from __future__ import annotations

from typing import Any

from shapeshift.errors import (
    CancelledRequestError,
    InvalidInputError,
    NotFoundError,
    OverloadedError,
    ShapeshiftError,
    UnsupportedError,
)

# Over HTTP these become 400, 404, 503, 501 and 400; everything else is INTERNAL, 500.
_CODES: tuple[tuple[type[ShapeshiftError], str], ...] = (
    (InvalidInputError, "INVALID_ARG"),
    (NotFoundError, "NOT_FOUND"),
    (OverloadedError, "UNAVAILABLE"),
    (UnsupportedError, "UNSUPPORTED"),
    (CancelledRequestError, "CANCELLED"),
)
CODES = ("OK", *(code for _, code in _CODES), "INTERNAL")
"""Every way in which a request can end."""


def code_name(error: BaseException) -> str:
    """The name of Triton's code for `error`."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "INTERNAL")


def name_of(pb_utils: Any, error: Any) -> str:
    """The name of the code of an error that Triton gave; INTERNAL for codes that no front gives."""
    codes = pb_utils.TritonError
    return next((name for name in CODES if getattr(codes, name, None) == error.code()), "INTERNAL")


def triton_error(pb_utils: Any, error: BaseException) -> Any:
    """`error` as a `pb_utils.TritonError`; an error that is not ours is named by its type."""
    text = str(error) if isinstance(error, ShapeshiftError) else f"{type(error).__name__}: {error}"
    # A server that lacks a code (they came over time) gets INTERNAL, its own default.
    code = getattr(pb_utils.TritonError, code_name(error), pb_utils.TritonError.INTERNAL)
    return pb_utils.TritonError(text, code)


def error_response(pb_utils: Any, error: BaseException) -> Any:
    """A response that carries nothing but `error`."""
    return pb_utils.InferenceResponse(error=triton_error(pb_utils, error))
