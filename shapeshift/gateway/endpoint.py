"""The way of a request: its body is read and checked, then its API makes the answer while the client is there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import orjson
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

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

Handler = Callable[..., Awaitable[object]]


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
class RequestContext:
    """What an API needs beside the body. request_id: that of its calls to models."""

    gateway: Gateway
    request_id: str

    @property
    def timeout_s(self) -> float:
        """Most seconds for a call to a model."""
        return self.gateway.settings.request_timeout_s


def _context_of(request: Request) -> RequestContext:
    return RequestContext(gateway_of(request), str(getattr(request.state, REQUEST_ID)))


Context = Annotated[RequestContext, Depends(_context_of)]


class BodyRoute(APIRoute):
    """Has a request answered by a function that gets its `body`, of the class of this parameter, and its `context`.

    The function returns a Response, the events of a stream, or the content of a JSON answer. FastAPI only describes it.
    """

    def __init__(self, path: str, endpoint: Handler, **options: Any) -> None:
        options |= {"response_model": None, "responses": {"4XX": {"description": "The error, as OpenAI has it"}}}
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Handler = self.endpoint
        hint = get_type_hints(handler)["body"]
        # Of several classes the first one knows which one a body is.
        first: type[ApiRequest] = (get_args(hint) or (hint,))[0]

        async def answer(request: Request) -> Response:
            context = _context_of(request)
            content = await bodies.content(request, context.gateway.limits)
            body = bodies.checked(content, first.class_of(content))
            try:
                return await while_connected(request.receive, _answer(handler(body, context), body.field_of))
            except ShapeshiftError as error:
                return api_error(error, body.field_of).response()

        return answer


def json_answer(content: object) -> Response:
    """Status 200 with JSON; arrays of numpy are lists of numbers."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


async def _answer(work: Awaitable[object], field_of: Callable[[str], str]) -> Response:
    result = await work
    if isinstance(result, AsyncGenerator):
        return await stream_of(result, field_of)
    return result if isinstance(result, Response) else json_answer(result)
