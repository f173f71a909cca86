"""The bodies of requests: read within their limits, and checked against their pydantic model in one pass."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from shapeshift.errors import CancelledRequestError, InvalidInputError, did_you_mean
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.schemas.common import FORMS, ApiRequest
from shapeshift.gateway.settings import GatewaySettings
from shapeshift.gateway.state import gateway_of

M = TypeVar("M", bound=BaseModel)

UNSUPPORTED = "unsupported_parameter"
# Errors of one body that are looked at, and characters or items of a wrong value.
_MOST_ERRORS, _MOST_SHOWN = 100, 100
# Of a body: each field has one, and an error is made for every field that is unknown. The largest object of a request,
# logit_bias, has half as many.
_MOST_COLONS = 1 << 19


def described(*models: type[BaseModel]) -> dict[str, Any]:
    """The entry `requestBody` of a route, for /openapi.json; `app` adds the schemas that it refers to."""
    schemas = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    content = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    return {"requestBody": {"required": True, "content": content}}


async def read(request: Request, model: type[M]) -> M:
    """The body as `model`. Raises ApiError that names the field, its value and what is allowed."""
    return checked(request, await content(request), model)


async def content(request: Request) -> bytes:
    """The body, unpacked. Raises ApiError where it is too long, comes too slowly or may have too many fields."""
    settings = gateway_of(request).settings
    body = _unpacked(await _bytes(request, settings), request.headers.get("content-encoding", ""), settings)
    if body.count(b":") > _MOST_COLONS:
        raise ApiError(400, f"body: got more; at most {_MOST_COLONS} fields, or colons in texts", code="invalid_value")
    return body


def checked(request: Request, body: bytes, model: type[M]) -> M:
    """The body of `request` as `model`. Raises as `read`."""
    try:
        asked = model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, model) from None
    request.state.asked = asked
    return asked


def field_of(request: Request, name: str) -> str:
    """What the request calls an input or parameter of the model."""
    asked = getattr(request.state, "asked", None)
    return asked.field_of(name) if isinstance(asked, ApiRequest) else name


async def _bytes(request: Request, settings: GatewaySettings) -> bytes:
    """The body itself. Status 413 where it is too long, 408 where it takes too long."""
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and int(stated) > settings.max_body_bytes:
        raise _too_long(f"{stated} bytes", settings)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise CancelledRequestError("the client has disconnected before its body ended")
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > settings.max_body_bytes:
                    raise _too_long("more", settings)
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except TimeoutError:
        text = f"body: not complete after {settings.body_timeout_s:g} s"
        raise ApiError(408, text, code="timeout", headers={"connection": "close"}) from None


def _unpacked(body: bytes, encoding: str, settings: GatewaySettings) -> bytes:
    """The content of a body. Status 413 where it is too long, 415 for another encoding than gzip."""
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() != "gzip":
        text = str(InvalidInputError("Content-Encoding", encoding, "gzip, or left out"))
        raise ApiError(415, text, code="unsupported_encoding", headers={"accept-encoding": "gzip"})
    unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        found = unpacking.decompress(body, settings.max_body_bytes + 1)
    except zlib.error as error:
        raise ApiError(400, f"body: {error}; Content-Encoding says gzip", code="invalid_encoding") from None
    if len(found) > settings.max_body_bytes:
        raise _too_long("more, unpacked", settings)
    if not unpacking.eof or unpacking.unused_data:
        raise ApiError(400, "body: not one whole gzip stream", code="invalid_encoding")
    return found


def _too_long(found: str, settings: GatewaySettings) -> ApiError:
    text = f"body: got {found}; at most {settings.max_body_bytes} bytes (--max-body-mb)"
    return ApiError(413, text, code="body_too_large", headers={"connection": "close"})


def _refusal(error: ValidationError, model: type[BaseModel]) -> ApiError:
    if error.error_count() > _MOST_ERRORS:
        text = f"body: got {error.error_count()} unknown fields or values of the wrong type; /docs lists the fields"
        return ApiError(400, text, code="invalid_value")
    found = error.errors(include_url=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        text = str(InvalidInputError("body", _shown(first["input"]), first["msg"]))
        return ApiError(400, text, code="invalid_type")
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(field, model.model_fields) if len(first["loc"]) == 1 else ""
        text = f"Unrecognized request argument supplied: {_path(first)}{hint}"
        return ApiError(400, text, param=_path(first), code="unknown_parameter")
    same = [one for one in found if one["loc"][:1] == first["loc"][:1]]
    return _of_field(field, same, model)


def _of_field(field: str, errors: list[ErrorDetails], model: type[BaseModel]) -> ApiError:
    """The refusal of a field: with several forms to choose from, what it may be is in the field's description."""
    first = errors[0]
    if first["type"] == "missing":
        return ApiError(400, f"{_path(first)}: this field is required", param=_path(first), code="missing_parameter")
    if first["type"] == UNSUPPORTED:
        text = f"{field}: this gateway does not have it; {first['msg']}"
        return ApiError(400, text, param=field, code=UNSUPPORTED)
    own = model.model_fields.get(field)
    if len(errors) > 1 and own is not None and own.description:
        param, value, allowed = field, "a value of another form", own.description
        if errors[0]["loc"] == errors[1]["loc"]:
            value = repr(_shown(first["input"]))
    elif first["type"] == "too_long":
        size = first["ctx"]["actual_length"]
        param, value = _path(first), "more" if size is None else f"{size} items"
        allowed = f"at most {first['ctx']['max_length']}"
    else:
        param, value, allowed = _path(first), _shown(first["input"]), first["msg"]
    return ApiError(400, str(InvalidInputError(param, value, allowed)), param=param, code="invalid_value")


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
