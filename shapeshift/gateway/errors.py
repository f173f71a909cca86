"""Errors of the project as OpenAI's clients expect them: HTTP status, type, code, and the parameter at fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

from shapeshift.errors import (
    CancelledRequestError,
    InvalidInputError,
    ModelDiedError,
    ModelError,
    ModelGoneError,
    NotFoundError,
    OverloadedError,
    ShapeshiftError,
    TimedOutError,
    UnsupportedError,
)

INVALID = "invalid_request_error"
_RETRY = {"retry-after": "1"}
TOO_LONG = "context_length_exceeded"
_TOKENS = re.compile(r"'?\d+ tokens'?; at most ")
_FIELD = re.compile(r"(?:row \d+: )?(?:parameter |sampling_parameters )?([A-Za-z_]\w*): got ")


@dataclass
class ApiError(Exception):
    """An answer that is an error. param: the field of the request at fault; code: a word for programs."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The body, in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return Response(orjson.dumps(self.body()), self.status, self.headers, "application/json")


def invalid(param: str, value: object, allowed: str, code: str = "invalid_value") -> ApiError:
    """The refusal of a value, in the words of InvalidInputError."""
    return ApiError(400, str(InvalidInputError(param, value, allowed)), param=param, code=code)


def api_error(error: BaseException, field_of: Callable[[str], str] = str) -> ApiError:
    """The answer to a request that ended with `error`. field_of: what the request calls an input of the model."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ModelError):
        return _of_model(error, field_of)
    text = str(error)
    if isinstance(error, InvalidInputError):
        return _refused(text, field_of)
    if isinstance(error, NotFoundError):
        return _not_found(text)
    if isinstance(error, TimedOutError):
        return ApiError(504, text, "timeout_error", code="timeout")
    if isinstance(error, OverloadedError):
        return _overloaded(text)
    if isinstance(error, ModelGoneError | ModelDiedError):
        return ApiError(503, text, "service_unavailable_error", code="unavailable", headers=dict(_RETRY))
    if isinstance(error, UnsupportedError):
        return ApiError(501, text, "not_supported_error", code="unsupported")
    if isinstance(error, CancelledRequestError):
        return ApiError(499, text, "cancelled_error", code="cancelled")
    # Others may hold what no client should see.
    shown = text if isinstance(error, ShapeshiftError) else "the gateway failed; its log says why"
    return ApiError(500, shown, "server_error", code="internal_error")


def _of_model(error: ModelError, field_of: Callable[[str], str]) -> ApiError:
    text = str(error)
    if error.code == "INVALID_ARG":
        return _refused(text, field_of)
    if error.code == "NOT_FOUND":
        return _not_found(text)
    if error.code == "UNAVAILABLE":
        return _overloaded(text)
    if error.code == "UNSUPPORTED":
        return ApiError(501, text, "not_supported_error", code="unsupported")
    if error.code == "CANCELLED":
        return ApiError(499, text, "cancelled_error", code="cancelled")
    return ApiError(500, text, "server_error", code="internal_error")


def _refused(text: str, field_of: Callable[[str], str]) -> ApiError:
    named = _FIELD.match(text)
    if named is None:
        return ApiError(400, text, code="invalid_value")
    param = field_of(named[1])
    code = TOO_LONG if _TOKENS.match(text, named.end()) else "invalid_value"
    return ApiError(400, f"{text[: named.start(1)]}{param}{text[named.end(1) :]}", param=param, code=code)


def _not_found(text: str) -> ApiError:
    return ApiError(404, text, param="task" if text.startswith("task") else "model", code="model_not_found")


def _overloaded(text: str) -> ApiError:
    return ApiError(429, text, "rate_limit_error", code="overloaded", headers=dict(_RETRY))
