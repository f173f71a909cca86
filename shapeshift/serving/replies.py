"""One table from our error types to Triton's codes, and error replies made with it."""

from __future__ import annotations

import re
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
_CODED = re.compile(r"\[([A-Z_]+)\] ")
_NOT_READY = "is not ready"


def code_name(error: BaseException) -> str:
    """The name of Triton's code for `error`."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "INTERNAL")


def with_code(pb_utils: Any, error: BaseException) -> Any:
    """A response that carries `error` with its code in the text, for a model that was asked by another one.

    On its way from model to model an error's code is lost (24.10); `parted` finds it again.
    """
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"[{code_name(error)}] {text_of(error)}"))


def parted(text: str) -> tuple[str, str]:
    """The name of the code and the text of an error that another model gave, made by `with_code` or by Triton."""
    match = _CODED.match(text)
    if match and match[1] in CODES:
        return match[1], text[match.end() :]
    return ("UNAVAILABLE" if _NOT_READY in text else "INTERNAL"), text


def triton_error(pb_utils: Any, error: BaseException) -> Any:
    """`error` as a `pb_utils.TritonError`."""
    return coded_error(pb_utils, code_name(error), text_of(error))


def coded_error(pb_utils: Any, code: str, text: str) -> Any:
    """A `pb_utils.TritonError` with the code of that name."""
    # A server that lacks a code (they came over time) gets INTERNAL, its own default.
    return pb_utils.TritonError(text, getattr(pb_utils.TritonError, code, pb_utils.TritonError.INTERNAL))


def error_response(pb_utils: Any, error: BaseException) -> Any:
    """A response that carries nothing but `error`."""
    return pb_utils.InferenceResponse(error=triton_error(pb_utils, error))


def text_of(error: BaseException) -> str:
    """What a caller is told; an error that is not ours is named by its type."""
    return str(error) if isinstance(error, ShapeshiftError) else f"{type(error).__name__}: {error}"
