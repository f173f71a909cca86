"""The registry of a front with adapters: filled with the starters, and checked against the base model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from shapeshift.adapter_cache.registry import store
from shapeshift.adapter_cache.settings import AdapterSettings
from shapeshift.build_engines import starter
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.errors import InvalidInputError
from shapeshift.registry import require_folder

if TYPE_CHECKING:
    # It imports torch.
    from shapeshift.adapter_cache.registry.peft import BaseModel


def parameters(name: str, params: AdapterSettings, base: BaseModel, target: Path, paths: BuildPaths) -> dict[str, str]:
    """The generated ones of the front model `name`, whose folder is `target`."""
    return {
        "base_names": ",".join(sorted(base.names)),
        "adapters_dir": paths.portable(_folder(name, params, paths), target),
    }


def multi_lora_files(version: Path) -> dict[str, str]:
    """The multi_lora.json of the generated folder (content by relative path), if the folder `version` has one."""
    result = store.read_multi_lora(version)
    return {f"{version.name}/{store.MULTI_LORA}": store.multi_lora_text(result)} if result else {}


def prepare(name: str, params: AdapterSettings, base: BaseModel, version: Path, paths: BuildPaths) -> str:
    """Fill the registry of front model `name` if there is none, or none for this base model, and check its adapters.
    Returns a summary line.

    version: the version folder in the model repository, which may hold multi_lora.json. Raises the error with
    which serving would reject an adapter.
    """
    from shapeshift.adapter_cache.registry import peft

    folder = _folder(name, params, paths)
    starters = starter.sources(params.starter_dir, store.FILES[0], paths)

    def fits(place: Path, entry: store.Entry) -> bool:
        with contextlib.suppress(InvalidInputError):
            peft.read(store.entry_folder(place, entry), base, entry.base)
            return True
        return False

    def add(place: Path, source: Path) -> None:
        peft.require_finite(peft.read(source, base))
        store.add(place, source.name, source, pinned=False, base=base.sha256)

    started = starter.StartedRegistry(
        folder,
        lambda place: [fits(place, entry) for entry in store.read(place).values()],
        starters,
        add,
        stays=bool(params.adapters_dir),
    )
    with started.prepared() as (place, moved):
        entries = store.read(place)
        for entry in entries.values():
            peft.read(store.entry_folder(place, entry), base, entry.base)
        for source in store.read_multi_lora(version).values():
            peft.read(source, base)
    return f"{len(entries)} adapters in {folder}{moved}"


def _folder(name: str, params: AdapterSettings, paths: BuildPaths) -> Path:
    """The registry of the front model `name`."""
    place = require_folder("adapters_dir", params.adapters_dir)
    return Path(place).absolute() if place else paths.build / "adapters" / name
