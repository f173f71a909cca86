"""Errors of the project as clients expect them, in the shape of the API that they speak."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.responses import Response

from shapeshift.errors import InvalidInputError, ModelDiedError, ModelGoneError, ShapeshiftError, TimedOutError
from shapeshift.serving.error_codes import code_name

MESSAGES = "/v1/messages"
"""Where Anthropic's API is."""
INVALID = "invalid_request_error"
TOO_LONG = "context_length_exceeded"
_TOKENS = re.compile(r"'?\d+ tokens'?; at most ")
# Anthropic's words; others of 400 and above are those of `INVALID`, and of 500 and above of `api_error`.
_ANTHROPICS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The field may be followed by a part of it, as in `logit_bias 15`, `stop[0]` and `structured_outputs choice[0]`.
_FIELD = re.compile(r"(?:row \d+: )?(?:parameter |sampling_parameters )?([A-Za-z_]\w*)(?: \w+)?(?:\[\d+\])*: got ")


@dataclass
class ApiError(Exception):
    """An answer that is an error. param: the field of the request at fault; code: a word for programs."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self, path: str = "", request_id: str | None = None) -> dict[str, Any]:
        """The body, in OpenAI's shape, or in Anthropic's below its path."""
        if path.startswith(MESSAGES):
            word = _ANTHROPICS.get(self.status, INVALID if self.status < 500 else "api_error")
            details = {"error_code": self.code, "param": self.param}
            error = {"type": word, "message": self.message, "details": details}
            return {"type": "error", "error": error, "request_id": request_id}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, path: str = "", request_id: str | None = None) -> Response:
        """The whole answer, as of `body`."""
        return Response(orjson.dumps(self.body(path, request_id)), self.status, self.headers, "application/json")

    def renamed(self, field_of: Callable[[str], str]) -> ApiError:
        """The same of the field that the request has in place of `param`."""
        if self.param is None or (param := field_of(self.param)) == self.param:
            return self
        return replace(self, message=self.message.replace(self.param, param, 1), param=param)


def invalid(param: str, value: object, allowed: str, code: str = "invalid_value") -> ApiError:
    """The refusal of a value, in the words of InvalidInputError."""
    return ApiError(400, str(InvalidInputError(param, value, allowed)), param=param, code=code)


def overloaded(text: str) -> ApiError:
    """The refusal of a request that may be sent again."""
    return ApiError(429, text, "rate_limit_error", code="overloaded", headers={"retry-after": "1"})


def unavailable(text: str) -> ApiError:
    """The answer while something that requests need is away."""
    return ApiError(503, text, "service_unavailable_error", code="unavailable", headers={"retry-after": "1"})


def api_error(error: BaseException, field_of: Callable[[str], str] = str) -> ApiError:
    """The answer to a request that ended with `error`. field_of: what the request calls an input of the model."""
    if isinstance(error, ApiError):
        return error.renamed(field_of)
    text = str(error)
    # These say more than the codes that they share.
    if isinstance(error, TimedOutError):
        return ApiError(504, text, "timeout_error", code="timeout")
    if isinstance(error, ModelGoneError | ModelDiedError):
        return unavailable(text)
    code = code_name(error)
    if code == "INVALID_ARG":
        return _refused(text, field_of)
    if code == "NOT_FOUND":
        param = "task" if text.startswith("task") else "model"
        return ApiError(404, text, param=param, code="model_not_found")
    if code == "UNAVAILABLE":
        return overloaded(text)
    if code == "UNSUPPORTED":
        return ApiError(501, text, "not_supported_error", code="unsupported")
    if code == "CANCELLED":
        return ApiError(499, text, "cancelled_error", code="cancelled")
    # Others may hold what no client should see.
    shown = text if isinstance(error, ShapeshiftError) else "the gateway failed; its log says why"
    return ApiError(500, shown, "server_error", code="internal_error")


def _refused(text: str, field_of: Callable[[str], str]) -> ApiError:
    named = _FIELD.match(text)
    if named is None:
        return ApiError(400, text, code="invalid_value")
    param = field_of(named[1])
    code = TOO_LONG if _TOKENS.match(text, named.end()) else "invalid_value"
    return ApiError(400, f"{text[: named.start(1)]}{param}{text[named.end(1) :]}", param=param, code=code)
