"""The bodies of the routes that load and unload adapters, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shapeshift.gateway.schemas.common import ApiRequest

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
