"""The way of a request: its body is read and checked, then its API makes the answer while the client is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import orjson
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from shapeshift.errors import CancelledRequestError, ShapeshiftError
from shapeshift.gateway.adapter_commands import AdapterCommands
from shapeshift.gateway.apis.fields import ApiRequest
from shapeshift.gateway.catalogue import Catalogue
from shapeshift.gateway.conversation import ChatRenderer
from shapeshift.gateway.errors import ApiError, api_error
from shapeshift.gateway.http import bodies
from shapeshift.gateway.http.api_keys import ApiKeys
from shapeshift.gateway.http.entrance import METER, REQUEST_ID
from shapeshift.gateway.http.meter import GatewayMetrics, Meter
from shapeshift.gateway.settings import GatewaySettings, Limits
from shapeshift.gateway.upstream import Upstream

T = TypeVar("T")
Handler = Callable[..., Awaitable[object]]
Failed = Callable[[ShapeshiftError | ApiError], bytes]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Gateway:
    """One gateway: the servers that it asks, what they serve, and how it is set up.

    keys: those that requests need; None: no key is asked for.
    """

    settings: GatewaySettings
    limits: Limits
    upstream: Upstream
    catalogue: Catalogue
    metrics: GatewayMetrics
    adapters: AdapterCommands
    keys: ApiKeys | None
    templates: ChatRenderer


def gateway_of(request: Request) -> Gateway:
    """The gateway that received the request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


@dataclass(frozen=True)
class RequestContext:
    """What an API needs beside the body. request_id: that of its calls to models; meter: counts what they use."""

    gateway: Gateway
    request_id: str
    meter: Meter

    @property
    def timeout_s(self) -> float:
        """Most seconds for a call to a model."""
        return self.gateway.settings.request_timeout_s


def _context_of(request: Request) -> RequestContext:
    state = request.state
    return RequestContext(gateway_of(request), getattr(state, REQUEST_ID), getattr(state, METER))


Context = Annotated[RequestContext, Depends(_context_of)]


class BodyRoute(APIRoute):
    """Has a request answered by a function that gets its `body`, of the class of this parameter, and its `context`.

    The function returns a Response, the events of a stream, or the content of a JSON answer. All that FastAPI does is
    to describe the route.
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
                return await _while_connected(request.receive, _answer(handler(body, context), body.field_of))
            except (ShapeshiftError, ApiError) as error:
                # `Entrance` makes an answer of it.
                raise api_error(error, body.field_of) from None

        return answer


def json_answer(content: object) -> Response:
    """Status 200 with JSON; arrays of numpy are lists of numbers."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


async def _answer(work: Awaitable[object], field_of: Callable[[str], str]) -> Response:
    result = await work
    if isinstance(result, AsyncGenerator):
        return await event_stream(result, lambda error: event(api_error(error, field_of).body()), DONE)
    return result if isinstance(result, Response) else json_answer(result)


def event(content: object, name: str = "") -> bytes:
    """One server-sent event with a JSON object. name: empty for an API whose events have none."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(content) + b"\n\n"


async def _while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` returns. Raises CancelledRequestError, after cancelling it, once the client has disconnected.

    The body of the request has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = is_over = False

    def leave(_: asyncio.Future[None]) -> None:
        nonlocal is_gone
        if not is_over:
            is_gone = True
            task.cancel()

    # `work` runs in this task: another one for it costs more than a short request's body and answer.
    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        # Without the client, unless this very task is cancelled, too, which is how a server stops.
        if is_gone and not task.uncancel():
            raise CancelledRequestError("the client has disconnected") from None
        raise
    finally:
        is_over = True
        watch.cancel()


async def event_stream(events: AsyncGenerator[bytes, None], failed: Failed, end: bytes = b"") -> Response:
    """The answer that sends `events` and then `end`.

    Waits for the first one: an error before it has an HTTP status of its own. Raises as `events` does. failed: the
    event of a later error.
    """
    return _EventStream(_with_end(await anext(events, None), events, failed, end))


async def _with_end(
    first: bytes | None, events: AsyncGenerator[bytes, None], failed: Failed, end: bytes
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        if first is not None:
            yield first
        try:
            async for one in events:
                yield one
        except (ShapeshiftError, ApiError) as error:
            yield failed(error)
    if end:
        yield end


class _EventStream(StreamingResponse):
    """Sends `events`, each as soon as it is there. They are closed when all are sent, or the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # Proxies such as nginx would collect events.
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(CancelledRequestError):
                await _while_connected(receive, self.stream_response(send))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
