"""Answers that end when their client goes away, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from shapeshift.errors import CancelledRequestError, ShapeshiftError
from shapeshift.gateway.errors import ApiError, api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """One server-sent event with a JSON object."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
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


async def stream_of(events: AsyncGenerator[bytes, None], field_of: Callable[[str], str]) -> EventStream:
    """The answer that sends `events` and then `DONE`.

    Waits for the first one: an error before it has an HTTP status of its own. Raises as `events` does. field_of: what
    the request calls an input of the model.
    """
    return EventStream(_with_end(await anext(events, None), events, field_of))


async def _with_end(
    first: bytes | None, events: AsyncGenerator[bytes, None], field_of: Callable[[str], str]
) -> AsyncGenerator[bytes, None]:
    """`first` and the other events; an error is an event too, for the status has been sent."""
    async with contextlib.aclosing(events):
        if first is not None:
            yield first
        try:
            async for one in events:
                yield one
        except (ShapeshiftError, ApiError) as error:
            yield event(api_error(error, field_of).body())
    yield DONE


class EventStream(StreamingResponse):
    """Sends `events`, each as soon as it is there. They are closed when all are sent, or the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # Proxies such as nginx would collect events.
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(CancelledRequestError):
                await while_connected(receive, self.stream_response(send))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
