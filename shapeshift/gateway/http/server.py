"""The HTTP server of a gateway."""

from __future__ import annotations

import uvicorn

from shapeshift.gateway.app import make_app
from shapeshift.gateway.settings import GatewaySettings

# Seconds that requests in flight get when the server stops, and that a connection without requests stays open.
_GRACE_S, _KEEP_ALIVE_S = 5, 75


def make_server(settings: GatewaySettings) -> uvicorn.Server:
    """A server that is not started. Its `run` returns after SIGINT or SIGTERM, or once `should_exit` is set."""
    config = uvicorn.Config(
        make_app(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return uvicorn.Server(config)
