"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from shapeshift.gateway.catalogue import Front
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.http import bodies
from shapeshift.gateway.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from shapeshift.gateway.state import Gateway, connected, gateway_of
from shapeshift.serving.description import GENERATION

router = APIRouter(tags=["adapters"])


@router.post("/v1/load_lora_adapter", openapi_extra=bodies.described(LoadAdapterRequest))
async def load_adapter(request: Request) -> Response:
    """Register an adapter; a running server applies it within two seconds."""
    asked = await bodies.read(request, LoadAdapterRequest)
    gateway = gateway_of(request)
    front = await connected(request, _front(gateway, asked.model))
    if asked.lora_name in front.adapters and not asked.load_inplace:
        text = f"lora_name: {front.name} has an adapter {asked.lora_name!r}; load_inplace replaces it"
        raise ApiError(400, text, param="lora_name", code="invalid_value")
    await connected(request, gateway.adapters.add(front.name, asked.lora_name, asked.lora_path))
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=bodies.described(UnloadAdapterRequest))
async def unload_adapter(request: Request) -> Response:
    """Remove an adapter; requests that wait or run are served."""
    asked = await bodies.read(request, UnloadAdapterRequest)
    gateway = gateway_of(request)
    front = await connected(request, _front(gateway, asked.model))
    await connected(request, gateway.adapters.remove(front.name, asked.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def _front(gateway: Gateway, model: str | None) -> Front:
    """The front called `model`, or the only one that takes adapters."""
    if model is not None:
        return (await gateway.catalogue.find(model, (GENERATION,))).front
    found = [front for front in gateway.catalogue.fronts if front.description.get("adapters") is not None]
    if len(found) != 1:
        names = ", ".join(front.name for front in found) or "none is served"
        raise ApiError(400, f"model: name the model whose adapters change; there are: {names}", param="model")
    return found[0]
