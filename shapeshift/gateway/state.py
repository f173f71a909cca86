"""What the routes of one gateway share."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from shapeshift.gateway.adapter_commands import AdapterCommands
from shapeshift.gateway.catalogue import Catalogue
from shapeshift.gateway.chat_renderer import ChatRenderer
from shapeshift.gateway.http.api_keys import ApiKeys
from shapeshift.gateway.http.limits import REQUEST_ID, Traffic
from shapeshift.gateway.http.streams import while_connected
from shapeshift.gateway.settings import GatewaySettings
from shapeshift.gateway.upstream import Upstream

T = TypeVar("T")


@dataclass(frozen=True)
class Gateway:
    """One gateway: the servers that it asks, what they serve, and how it is set up.

    keys: those that requests need; None: no key is asked for.
    """

    settings: GatewaySettings
    upstream: Upstream
    catalogue: Catalogue
    traffic: Traffic
    adapters: AdapterCommands
    keys: ApiKeys | None
    templates: ChatRenderer


def gateway_of(request: Request) -> Gateway:
    """The gateway that received the request."""
    found: Gateway = request.app.state.gateway
    return found


def id_of(request: Request) -> str:
    """The id of a request, see `limits.RequestIds`."""
    return str(request.state._state[REQUEST_ID])


async def connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client goes away, see `streams.while_connected`."""
    return await while_connected(request.receive, work)


def answer(content: object) -> Response:
    """Status 200 with JSON; arrays of numpy are lists of numbers."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
