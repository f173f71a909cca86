"""LoRA adapters of front models: fills a missing registry, and checks every adapter."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from shapeshift.adapter_cache.registry import store
from shapeshift.adapter_cache.settings import AdapterCacheSettings
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.store import registry_copy
from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.errors import NotFoundError
from shapeshift.registry import FILE as REGISTRY_FILE


def registry_folder(name: str, settings: AdapterCacheSettings, paths: BuildPaths) -> Path:
    """The registry of the front model `name`."""
    if (copy := registry_copy.folder(settings.adapters_dir, name, paths)) is not None:
        return copy
    return Path(settings.adapters_dir).absolute() if settings.adapters_dir else paths.build / "adapters" / name


def prepare_registry(
    name: str,
    settings: AdapterCacheSettings,
    checkpoint: Checkpoint,
    base_names: Collection[str],
    version: Path,
    paths: BuildPaths,
) -> str:
    """Fill the registry of front model `name` if there is none, and check its adapters. Returns a summary line.

    base_names: names of the base model in the configurations of adapters
    version: the version folder in the model repository, which may hold multi_lora.json. Raises the error with
    which serving would reject an adapter.
    """
    # These import torch, which no other step of the build needs.
    from shapeshift.adapter_cache.registry import peft
    from shapeshift.fused_decode.model.architecture import Architecture

    folder = registry_folder(name, settings, paths)
    registry_copy.update("adapters_dir", settings.adapters_dir, store.LAYOUT, name, paths, settings.starter_dir)
    names = {str(checkpoint.folder), *base_names}
    base = peft.BaseModel(
        Architecture.read(checkpoint.folder), names, settings.max_rank, checkpoint.folder, checkpoint.sha256
    )
    if settings.starter_dir and not (folder / REGISTRY_FILE).exists():
        for source in _starter_adapters(settings.starter_dir, paths):
            peft.require_finite(peft.read(source, base))
            store.add(folder, source.name, source, pinned=False, base=checkpoint.sha256)
    entries = store.read(folder)
    for entry in entries.values():
        peft.read(store.entry_folder(folder, entry), base, entry.base)
    for source in store.read_multi_lora(version).values():
        peft.read(source, base)
    return f"{len(entries)} adapters in {folder}"


def multi_lora_files(version: Path) -> dict[str, str]:
    """The multi_lora.json of the generated folder (content by relative path), if the folder `version` has one."""
    found = store.read_multi_lora(version)
    return {f"{version.name}/{store.MULTI_LORA}": store.multi_lora_text(found)} if found else {}


def _starter_adapters(name: str, paths: BuildPaths) -> list[Path]:
    for folder in (Path(name), *(checkpoints / name for checkpoints in paths.checkpoints)):
        if folder.is_dir():
            return sorted(path.parent for path in folder.glob("*/adapter_config.json"))
    raise NotFoundError(f"starter_dir: no folder {name}, nor {name} under {', '.join(map(str, paths.checkpoints))}")
