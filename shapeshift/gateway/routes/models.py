"""GET /v1/models: what requests may name."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from shapeshift.gateway.catalogue import Front
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.state import answer, gateway_of

router = APIRouter(tags=["models"])
# Of a front's description, what stands beside OpenAI's fields.
_SHOWN = (
    *("kind", "also", "version", "max_batch_size", "embedding_size", "outputs", "labels", "activation", "pairs"),
    *("only_pairs", "tasks", "prompts", "levels", "precision"),
)


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The fronts, and their adapters as BASE:ADAPTER, and by their own name where only one front has it."""
    catalogue = gateway_of(request).catalogue
    found = [_shown(name, front, adapter, catalogue.since) for name, front, adapter in catalogue.ids()]
    return answer({"object": "list", "data": found})


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    """One of them; 404 where there is none."""
    catalogue = gateway_of(request).catalogue
    for name, front, adapter in catalogue.ids():
        if name == model:
            return answer(_shown(name, front, adapter, catalogue.since))
    raise ApiError(404, f"model: {model[:80]!r} is not served", param="model", code="model_not_found")


def _shown(name: str, front: Front, adapter: str, since: int) -> dict[str, Any]:
    own = front.description
    found = {
        "id": name,
        "object": "model",
        "created": since,
        "owned_by": "shapeshift",
        "root": own.get("base_model") or own.get("checkpoint") or front.name,
        "parent": front.name if adapter else None,
        "max_model_len": own.get("max_tokens"),
    }
    return found | {key: own[key] for key in _SHOWN if own.get(key) is not None}
