"""The way of a request: its body is read and checked, then its API makes the answer while the client is there."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response

from shapeshift.errors import ShapeshiftError
from shapeshift.gateway.adapter_commands import AdapterCommands
from shapeshift.gateway.apis.fields import ApiRequest
from shapeshift.gateway.catalogue import Catalogue
from shapeshift.gateway.conversation import ChatRenderer
from shapeshift.gateway.errors import api_error
from shapeshift.gateway.http import bodies
from shapeshift.gateway.http.api_keys import ApiKeys
from shapeshift.gateway.http.entrance import REQUEST_ID, Traffic
from shapeshift.gateway.http.streams import stream_of, while_connected
from shapeshift.gateway.settings import GatewaySettings, Limits
from shapeshift.gateway.upstream import Upstream

M = TypeVar("M", bound=ApiRequest)
Handler = Callable[[M, "Context"], Awaitable[object]]


@dataclass(frozen=True)
class Gateway:
    """One gateway: the servers that it asks, what they serve, and how it is set up.

    keys: those that requests need; None: no key is asked for.
    """

    settings: GatewaySettings
    limits: Limits
    upstream: Upstream
    catalogue: Catalogue
    traffic: Traffic
    adapters: AdapterCommands
    keys: ApiKeys | None
    templates: ChatRenderer


def gateway_of(request: Request) -> Gateway:
    """The gateway that received the request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


@dataclass(frozen=True)
class Context:
    """Of one request. request_id: that of its calls to models."""

    gateway: Gateway
    request_id: str

    @property
    def timeout_s(self) -> float:
        """Most seconds for a call to a model."""
        return self.gateway.settings.request_timeout_s


class Api(APIRouter):
    """The routes of one API. bodies: what they read."""

    def __init__(self, name: str) -> None:
        super().__init__(tags=[name])
        self.bodies: list[type[ApiRequest]] = []

    def reads(
        self,
        path: str,
        *models: type[M],
        choose: Callable[[bytes], type[M]] | None = None,
        include_in_schema: bool = True,
    ) -> Callable[[Handler[M]], Handler[M]]:
        """Has POST `path` answered by the decorated function, which gets the body as the model, and its context.

        It returns a Response, the events of a stream, or the content of a JSON answer. choose: which of several models
        a body is.
        """
        self.bodies += models

        def decorate(handler: Handler[M]) -> Handler[M]:
            async def endpoint(request: Request) -> Response:
                gateway = gateway_of(request)
                content = await bodies.content(request, gateway.limits)
                body = bodies.checked(content, models[0] if choose is None else choose(content))
                try:
                    work = handler(body, Context(gateway, str(getattr(request.state, REQUEST_ID))))
                    return await while_connected(request.receive, _answer(work, body.field_of))
                except ShapeshiftError as error:
                    return api_error(error, body.field_of).response()

            self.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                name=handler.__name__,
                description=inspect.getdoc(handler),
                openapi_extra=_described(*models),
                include_in_schema=include_in_schema,
            )
            return handler

        return decorate


def json_answer(content: object) -> Response:
    """Status 200 with JSON; arrays of numpy are lists of numbers."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


async def _answer(work: Awaitable[object], field_of: Callable[[str], str]) -> Response:
    result = await work
    if isinstance(result, AsyncGenerator):
        return await stream_of(result, field_of)
    return result if isinstance(result, Response) else json_answer(result)


def _described(*models: type[ApiRequest]) -> dict[str, Any]:
    """The entry `requestBody` of a route, for /openapi.json; `app` adds the schemas that it refers to."""
    schemas = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    content = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    return {"requestBody": {"required": True, "content": content}}
