"""The application: its parts, its routes, and what every request passes before them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import shapeshift
from shapeshift.gateway.adapter_commands import AdapterCommands
from shapeshift.gateway.apis import adapters, models, probes, tokenize
from shapeshift.gateway.apis.generation import chat, completions, messages, prompts, responses
from shapeshift.gateway.apis.pooling import classify, embeddings, pooling, rerank, scores
from shapeshift.gateway.catalogue import Catalogue
from shapeshift.gateway.conversation import ChatRenderer
from shapeshift.gateway.endpoint import Gateway
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.http.api_keys import ApiKeys, Key
from shapeshift.gateway.http.entrance import Entrance
from shapeshift.gateway.http.meter import GatewayMetrics
from shapeshift.gateway.settings import GatewaySettings, Limits
from shapeshift.gateway.upstream import Upstream
from shapeshift.loops import repeat
from shapeshift.serving.front import tracer_of
from shapeshift.triton.async_client import AsyncClient
from shapeshift.triton.endpoint import tls_from_environment

_LOG = logging.getLogger("shapeshift.gateway")
_APIS = (
    *(models, chat, responses, messages, prompts, completions),
    *(embeddings, pooling, rerank, scores, classify, tokenize, adapters, probes),
)


def make_app(settings: GatewaySettings, clients: Sequence[AsyncClient] = (), limits: Limits | None = None) -> FastAPI:
    """The application of a gateway. clients: those of `settings.triton`, made where there are none."""
    tls = tls_from_environment()
    limits = limits or Limits()
    tracer = tracer_of("gateway")
    usual = Key("", settings.requests_per_minute, settings.tokens_per_minute)
    upstream = Upstream(clients or [AsyncClient(one, tls) for one in settings.triton])
    gateway = Gateway(
        settings,
        limits,
        upstream,
        Catalogue(upstream),
        GatewayMetrics(),
        AdapterCommands(settings),
        None if settings.api_keys is None else ApiKeys(settings.api_keys, usual=usual),
        ChatRenderer(),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        looking = asyncio.create_task(repeat("the catalogue", gateway.catalogue.refresh, limits.refresh_s, _LOG.error))
        gateway.templates.start()
        yield
        looking.cancel()
        gateway.templates.close()
        await gateway.adapters.close()
        await upstream.close()
        if tracer is not None:
            tracer.close()

    # With the files of /docs from its wheel. `validatorUrl`: a public host would be shown the document's address.
    app: FastAPI = FastAPIOffline(
        title="Shapeshift gateway",
        version=shapeshift.__version__,
        lifespan=lifespan,
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )
    app.state.gateway = gateway
    for api in _APIS:
        # Not by include_router, which matches each request against router after router: 0.1 ms.
        app.router.routes.extend(api.router.routes)
    app.add_exception_handler(HTTPException, _no_route)
    # The last one is the outermost.
    app.add_middleware(
        Entrance, metrics=gateway.metrics, max_requests=settings.max_requests, keys=gateway.keys, tracer=tracer
    )
    if settings.cors_origins:
        # Before keys are asked for: the question whether a page may ask has none.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}; /docs lists what there is"
    return ApiError(error.status_code, text, code="unknown_url", headers=dict(error.headers or {})).response(
        request.url.path
    )
