"""The bodies of requests: read within their limits, and checked against their pydantic model in one pass."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from shapeshift.errors import CancelledRequestError, InvalidInputError, did_you_mean
from shapeshift.gateway.apis.fields import FORMS
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.settings import Limits

M = TypeVar("M", bound=BaseModel)

UNSUPPORTED = "unsupported_parameter"
# Errors of one body that are looked at, and characters or items of a wrong value.
_MOST_ERRORS, _MOST_SHOWN = 100, 100
# Of a body: each field has one, and an error is made for every field that is unknown. The largest object of a request,
# logit_bias, has half as many.
_MOST_COLONS = 1 << 19


async def content(request: Request, limits: Limits) -> bytes:
    """The body, unpacked. Raises ApiError where it is too long, comes too slowly or may have too many fields."""
    body = _unpacked(await _bytes(request, limits), request.headers.get("content-encoding", ""), limits)
    if body.count(b":") > _MOST_COLONS:
        raise ApiError(400, f"body: got more; at most {_MOST_COLONS} fields, or colons in texts", code="invalid_value")
    return body


def checked(body: bytes, model: type[M]) -> M:
    """The body as `model`. Raises ApiError that names the field, its value and what is allowed."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, model) from None


async def _bytes(request: Request, limits: Limits) -> bytes:
    """The body itself. Status 413 where it is too long, 408 where it takes too long."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise _too_long(f"{length} bytes", limits)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                pieces.append(piece)
                size += len(piece)
                if size > limits.max_body_bytes:
                    raise _too_long("more", limits)
            return b"".join(pieces)
    except ClientDisconnect:
        raise CancelledRequestError("the client has disconnected before its body ended") from None
    except TimeoutError:
        text = f"body: not complete after {limits.body_timeout_s:g} s"
        raise ApiError(408, text, code="timeout", headers={"connection": "close"}) from None


def _unpacked(body: bytes, encoding: str, limits: Limits) -> bytes:
    """The content of a body. Status 413 where it is too long, 415 for another encoding than gzip."""
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() != "gzip":
        text = str(InvalidInputError("Content-Encoding", encoding, "gzip, or left out"))
        raise ApiError(415, text, code="unsupported_encoding", headers={"accept-encoding": "gzip"})
    unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        unpacked = unpacking.decompress(body, limits.max_body_bytes + 1)
    except zlib.error as error:
        raise ApiError(400, f"body: {error}; Content-Encoding says gzip", code="invalid_encoding") from None
    if len(unpacked) > limits.max_body_bytes:
        raise _too_long("more, unpacked", limits)
    if not unpacking.eof or unpacking.unused_data:
        raise ApiError(400, "body: not one whole gzip stream", code="invalid_encoding")
    return unpacked


def _too_long(size: str, limits: Limits) -> ApiError:
    text = f"body: got {size}; at most {limits.max_body_bytes} bytes"
    return ApiError(413, text, code="body_too_large", headers={"connection": "close"})


def _refusal(error: ValidationError, model: type[BaseModel]) -> ApiError:
    if error.error_count() > _MOST_ERRORS:
        text = f"body: got {error.error_count()} unknown fields or values of the wrong type; /docs lists the fields"
        return ApiError(400, text, code="invalid_value")
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        text = str(InvalidInputError("body", _shown(first["input"]), first["msg"]))
        return ApiError(400, text, code="invalid_type")
    field, path = str(first["loc"][0]), _path(first)
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(field, model.model_fields) if len(first["loc"]) == 1 else ""
        return ApiError(
            400, f"Unrecognized request argument supplied: {path}{hint}", param=path, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{path}: this field is required", param=path, code="missing_parameter")
    if first["type"] == UNSUPPORTED:
        return ApiError(400, f"{path}: this gateway does not have it; {first['msg']}", param=path, code=UNSUPPORTED)
    return _of_field([one for one in errors if one["loc"][:1] == first["loc"][:1]], model.model_fields.get(field))


def _of_field(errors: list[ErrorDetails], field: FieldInfo | None) -> ApiError:
    """The refusal of a value: with several forms to choose from, what it may be is in the field's description."""
    first = errors[0]
    if len(errors) > 1 and field is not None and field.description:
        same_place = first["loc"] == errors[1]["loc"]
        value = repr(_shown(first["input"])) if same_place else "a value of another form"
        return invalid(str(first["loc"][0]), value, field.description)
    if first["type"] == "too_long":
        size = first["ctx"]["actual_length"]
        value = "more" if size is None else f"{size} items"
        return invalid(_path(first), value, f"at most {first['ctx']['max_length']}")
    return invalid(_path(first), _shown(first["input"]), first["msg"])


def _path(error: ErrorDetails) -> str:
    """The place of an error, as in messages[0].content; not which form of the field it was held against."""
    places = [step for step in error["loc"] if step not in FORMS]
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in places]
    return "".join(steps).removeprefix(".")[:200]


def _shown(value: Any, depth: int = 2) -> Any:
    """The beginning of a value: a whole list of millions would be made a text first, to be cut then."""
    if isinstance(value, str):
        return value[:_MOST_SHOWN]
    if isinstance(value, list):
        return [_shown(one, depth - 1) for one in value[:_MOST_SHOWN]] if depth else []
    if isinstance(value, dict):
        items = itertools.islice(value.items(), _MOST_SHOWN)
        return {_shown(key): _shown(one, depth - 1) for key, one in items} if depth else {}
    return value
