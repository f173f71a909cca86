"""Front models that generate: nothing is compiled for them but kernels, their checkpoint is served as it is."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines import adapters
from build_engines.published import CONFIG, write_front
from build_engines.settings import Places
from shapeshift import settings
from shapeshift.adapter_cache.scheduling import SchedulingSettings
from shapeshift.adapter_cache.settings import AdapterCacheSettings
from shapeshift.engines import precision
from shapeshift.engines.checkpoint import Checkpoint, find, open_checkpoint
from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.fused_decode.settings import ForwardSettings, FusedDecodeSettings
from shapeshift.triton import modelconfig

BACKEND, WITH_ADAPTERS = "fused_decode", "adapter_cache"


@dataclass(frozen=True)
class DecodeFront:
    """A folder of the model repository whose model generates, or forwards to one that does.

    adapters: of a model whose requests may name adapters.
    """

    name: str
    folder: Path
    config: Any
    settings: FusedDecodeSettings | ForwardSettings
    adapters: AdapterCacheSettings | None = None


def read(folder: Path, config: Any, values: Mapping[str, str]) -> DecodeFront:
    """The front model in `folder`; errors name the field."""
    kind: type[ForwardSettings | FusedDecodeSettings] = (
        ForwardSettings if "forward_to" in values else FusedDecodeSettings
    )
    if config.backend == BACKEND or kind is ForwardSettings:
        settings.refuse_unknown(values, settings.names(kind))
        return DecodeFront(folder.name, folder, config, settings.read(kind, values))
    settings.refuse_unknown(values, settings.names(kind, AdapterCacheSettings, SchedulingSettings))
    settings.read(SchedulingSettings, values)
    own, adapters_of = settings.read(kind, values), settings.read(AdapterCacheSettings, values)
    return DecodeFront(folder.name, folder, config, own, adapters_of)


def forwards_to(front: DecodeFront) -> tuple[str, ...]:
    """The one model that a front asks which only forwards; none for a model that generates."""
    return (front.settings.forward_to,) if isinstance(front.settings, ForwardSettings) else ()


def publish(front: DecodeFront, places: Places) -> str:
    """Check what the model needs and write its folder in the generated repository; a line that says what it is."""
    target = places.generated / front.name
    own = front.settings
    if isinstance(own, ForwardSettings):
        if not (places.repository / own.forward_to / CONFIG).is_file():
            raise NotFoundError(f"forward_to: no model {own.forward_to} in {places.repository}")
        about = f"forwards to {own.forward_to}"
        write_front(front.folder, front.config, target, {}, about)
        return about
    checkpoint = open_checkpoint(find(own.checkpoint, places.checkpoints))
    kernels = places.build / "kernels"
    lora = front.adapters is not None
    note = "up to date" if _published(target) == checkpoint.sha256 else _check(checkpoint, own.native, kernels, lora)
    stated = {
        "checkpoint": places.stated(checkpoint.folder, target),
        "checkpoint_sha256": checkpoint.sha256,
        "precision": precision.resolve(own.precision, _on_gpu(front.config)),
        "kernel_cache": places.stated(kernels, target),
    }
    about = f"checkpoint: {own.checkpoint}, {stated['precision']}"
    further: dict[str, str] = {}
    held = f"{own.max_concurrency} slots of {own.max_length} tokens"
    if front.adapters is not None:
        version = front.folder / "1"
        known = {own.checkpoint, Path(own.checkpoint).name, *filter(None, front.adapters.base_names.split(","))}
        stated["base_names"] = ",".join(sorted(known))
        stated["adapters_dir"] = places.stated(adapters.folder_of(front.name, front.adapters, places), target)
        further = adapters.named(version)
        held += f", {adapters.bring(front.name, front.adapters, checkpoint.folder, version, places)}"
    write_front(front.folder, front.config, target, stated, about, further)
    return f"{note}; {about}, {held}"


def _on_gpu(config: Any) -> bool:
    return any(group.kind == type(group).KIND_GPU for group in config.instance_group)


def _published(target: Path) -> str:
    """The hash of the checkpoint that was published there."""
    try:
        return modelconfig.parameters(modelconfig.read(target / CONFIG)).get("checkpoint_sha256", "")
    except ShapeshiftError:
        return ""


def _check(checkpoint: Checkpoint, native: bool, kernels: Path, lora: bool) -> str:
    """Raise the error with which the model would not load; compile the kernels, or say why not."""
    # torch comes with these, which nothing else here needs.
    from shapeshift.adapter_cache import native as native_terms
    from shapeshift.fused_decode import compiled
    from shapeshift.fused_decode.architecture import Architecture
    from shapeshift.fused_decode.detokenize import token_bytes
    from shapeshift.fused_decode.weights import WeightFiles

    WeightFiles(checkpoint.folder, Architecture.read(checkpoint.folder))
    token_bytes(checkpoint.tokenizer_file)
    if not native:
        return "checked"
    try:
        compiled.library(kernels)
        if lora:
            native_terms.library(kernels)
    except (OSError, subprocess.SubprocessError) as error:
        return f"checked, without compiled kernels ({error})"
    return "checked, kernels compiled"
