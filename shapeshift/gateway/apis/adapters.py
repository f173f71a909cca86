"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field
from starlette.responses import PlainTextResponse

from shapeshift.gateway.apis.fields import ApiRequest
from shapeshift.gateway.catalogue import Front
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.errors import ApiError
from shapeshift.serving.description import GENERATION

router = APIRouter(route_class=BodyRoute, tags=["adapters"])

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class LoadAdapterRequest(ApiRequest):
    """lora_path: a folder under the gateway's --adapter-root. model: which front; None: the only one with adapters."""

    lora_name: Name
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(ApiRequest):
    """The adapter to remove."""

    lora_name: Name
    model: str | None = None


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadAdapterRequest, context: Context) -> Response:
    """Register an adapter; a running server applies it within two seconds."""
    front = await _front(context, body.model)
    if body.lora_name in front.names("adapters") and not body.load_inplace:
        text = f"lora_name: {front.name} has an adapter {body.lora_name!r}; load_inplace replaces it"
        raise ApiError(400, text, param="lora_name", code="invalid_value")
    await context.gateway.adapters.add(front.name, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadAdapterRequest, context: Context) -> Response:
    """Remove an adapter; requests that wait or run are served."""
    front = await _front(context, body.model)
    await context.gateway.adapters.remove(front.name, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _front(context: Context, model: str | None) -> Front:
    """The front called `model`, or the only one that takes adapters."""
    catalogue = context.gateway.catalogue
    if model is not None:
        return (await catalogue.find(model, (GENERATION,))).front
    fronts = [front for front in catalogue.fronts if front.description.get("adapters") is not None]
    if len(fronts) != 1:
        names = ", ".join(front.name for front in fronts) or "none is served"
        raise ApiError(400, f"model: name the model whose adapters change; there are: {names}", param="model")
    return fronts[0]
