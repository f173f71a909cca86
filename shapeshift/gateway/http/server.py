"""The HTTP server of a gateway."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import uvicorn

from shapeshift.gateway.app import make_app
from shapeshift.gateway.http.protocol import BoundedHttp
from shapeshift.gateway.settings import GatewaySettings
from shapeshift.triton.async_client import AsyncClient

# Seconds that requests in flight get when the server stops, and that a connection without requests stays open.
_GRACE_S, _KEEP_ALIVE_S = 5, 75


def make_server(settings: GatewaySettings, clients: Sequence[AsyncClient] = ()) -> uvicorn.Server:
    """A server that is not started. Its `run` returns after SIGINT or SIGTERM, or once `should_exit` is set.

    clients: as of `make_app`.
    """
    protocol: Any = functools.partial(BoundedHttp, settings)
    config = uvicorn.Config(
        make_app(settings, clients),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return uvicorn.Server(config)
