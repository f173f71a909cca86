"""The HTTP server of a gateway."""

from __future__ import annotations

import functools
import logging
import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import uvicorn

from shapeshift.gateway.app import make_app
from shapeshift.gateway.http.protocol import BoundedHttp
from shapeshift.gateway.settings import GatewaySettings
from shapeshift.triton.async_client import AsyncClient

# Seconds that requests in flight get when the server stops, and that a connection without requests stays open.
_GRACE_S, _KEEP_ALIVE_S = 5, 75
# Files beside connections of clients: connections to servers, and those that are being refused.
_OTHER_FILES = 128
_LOG = logging.getLogger("shapeshift.gateway")


def fit_connections(settings: GatewaySettings) -> GatewaySettings:
    """The settings with the connections that this process may have open at once; it may open more files from then on.

    The soft limit is raised, as far as the hard one lets it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.max_connections + _OTHER_FILES
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = max(soft - _OTHER_FILES, soft // 2)
    if soft == resource.RLIM_INFINITY or settings.max_connections <= most:
        return settings
    _LOG.warning("max_connections: %d, not %d: ulimit -n is %d", most, settings.max_connections, soft)
    return replace(settings, max_connections=most)


def make_server(settings: GatewaySettings, clients: Sequence[AsyncClient] = ()) -> uvicorn.Server:
    """A server that is not started. Its `run` returns after SIGINT or SIGTERM, or once `should_exit` is set.

    clients: as of `make_app`.
    """
    settings = fit_connections(settings)
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
