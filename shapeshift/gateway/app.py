"""The application: its routes, what every request passes before them, and what errors become."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import shapeshift
from shapeshift.errors import ShapeshiftError
from shapeshift.gateway.adapter_commands import AdapterCommands
from shapeshift.gateway.catalogue import Catalogue
from shapeshift.gateway.chat_renderer import ChatRenderer
from shapeshift.gateway.errors import ApiError, api_error
from shapeshift.gateway.http.api_keys import ApiKeys, RequireKey
from shapeshift.gateway.http.bodies import field_of
from shapeshift.gateway.http.limits import Admission, Faults, RequestIds, Traffic
from shapeshift.gateway.routes import (
    adapters,
    chat,
    classify,
    completions,
    embeddings,
    models,
    page,
    probes,
    rerank,
    tei,
)
from shapeshift.gateway.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from shapeshift.gateway.schemas.chat import ChatRequest
from shapeshift.gateway.schemas.classify import ClassifyRequest
from shapeshift.gateway.schemas.completions import CompletionRequest
from shapeshift.gateway.schemas.embeddings import EmbeddingRequest
from shapeshift.gateway.schemas.rerank import RerankRequest
from shapeshift.gateway.schemas.tei import EmbedRequest, PredictRequest, TeiRerankRequest
from shapeshift.gateway.settings import GatewaySettings
from shapeshift.gateway.state import Gateway
from shapeshift.gateway.upstream import Upstream
from shapeshift.triton.async_client import AsyncClient
from shapeshift.triton.endpoint import tls_from_environment

_ROUTES = (models, chat, completions, embeddings, rerank, classify, tei, adapters, probes, page)
_BODIES: tuple[type[BaseModel], ...] = (
    *(ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ClassifyRequest),
    *(EmbedRequest, TeiRerankRequest, PredictRequest, LoadAdapterRequest, UnloadAdapterRequest),
)


def make_app(settings: GatewaySettings, clients: Sequence[AsyncClient] = ()) -> FastAPI:
    """The application of a gateway. clients: those of `settings.triton`, made where there are none."""
    tls = tls_from_environment()
    upstream = Upstream(clients or [AsyncClient(one, tls) for one in settings.triton])
    catalogue = Catalogue(upstream, settings.refresh_s)
    keys = None if settings.api_keys is None else ApiKeys(settings.api_keys)
    gateway = Gateway(settings, upstream, catalogue, Traffic(), AdapterCommands(settings), keys, ChatRenderer())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        looking = asyncio.create_task(gateway.catalogue.run())
        gateway.templates.start()
        yield
        looking.cancel()
        gateway.templates.close()
        await gateway.adapters.close()
        await upstream.close()

    # With the files of /docs from its wheel. `validatorUrl`: a public host would be shown the document's address.
    app: FastAPI = FastAPIOffline(
        title="Shapeshift gateway",
        version=shapeshift.__version__,
        lifespan=lifespan,
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )
    app.state.gateway = gateway
    for one in _ROUTES:
        # Not by include_router, which matches each request against router after router: 0.1 ms.
        app.router.routes.extend(one.router.routes)
    # The last one is the outermost.
    app.add_middleware(Faults)
    if keys is not None:
        app.add_middleware(RequireKey, keys=keys)
    app.add_middleware(Admission, traffic=gateway.traffic, max_requests=settings.max_requests)
    if settings.cors_origins:
        # Before keys are asked for: the question whether a page may ask has none.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    app.add_middleware(RequestIds)
    for kind in (ShapeshiftError, ApiError):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(HTTPException, _no_route)
    _describe_bodies(app)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    return api_error(error, functools.partial(field_of, request)).response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}; /docs lists what there is"
    return ApiError(error.status_code, text, code="unknown_url", headers=dict(error.headers or {})).response()


def _describe_bodies(app: FastAPI) -> None:
    """Put the schemas of the bodies into /openapi.json; routes read them themselves, see `bodies`."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        found = generate()
        _, definitions = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template="#/components/schemas/{model}"
        )
        found.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return found

    app.openapi = described  # type: ignore[method-assign]
