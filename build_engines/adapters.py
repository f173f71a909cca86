"""The adapters of front models: registries filled where there are none yet, and every adapter checked."""

from __future__ import annotations

from pathlib import Path

from build_engines.settings import Places
from shapeshift.adapter_cache import multi_lora, registry
from shapeshift.adapter_cache.settings import AdapterCacheSettings
from shapeshift.errors import NotFoundError


def folder_of(name: str, own: AdapterCacheSettings, places: Places) -> Path:
    """The registry of the front model `name`."""
    return Path(own.adapters_dir).absolute() if own.adapters_dir else places.build / "adapters" / name


def bring(name: str, own: AdapterCacheSettings, checkpoint: Path, version: Path, places: Places) -> str:
    """Fill the registry of front model `name` if there is none, and check what it holds; a line that says so.

    version: the version folder in the model repository, which may hold multi_lora.json. Raises the error with
    which an adapter would be refused.
    """
    # torch comes with these, which nothing else here needs.
    from shapeshift.adapter_cache import peft
    from shapeshift.fused_decode.architecture import Architecture

    folder = folder_of(name, own, places)
    names = {checkpoint.name, *filter(None, own.base_names.split(","))}
    base = peft.Base(Architecture.read(checkpoint), names, own.max_rank)
    if registry.stamp(folder) is None and own.starter_dir:
        for source in _starters(own.starter_dir, places):
            peft.require_finite(peft.read(source, base))
            registry.add(folder, source.name, source, pinned=False)
    entries = registry.read(folder)
    for entry in entries.values():
        peft.read(registry.place(folder, entry), base)
    for source in multi_lora.read(version).values():
        peft.read(source, base)
    return f"{len(entries)} adapters in {folder}"


def named(version: Path) -> dict[str, str]:
    """The file, by its name in the generated folder, that names what the folder `version` names; none for none."""
    found = multi_lora.read(version)
    return {f"{version.name}/{multi_lora.FILE}": multi_lora.content(found)} if found else {}


def _starters(name: str, places: Places) -> list[Path]:
    for place in (Path(name), *(checkpoints / name for checkpoints in places.checkpoints)):
        if place.is_dir():
            return sorted(path.parent for path in place.glob("*/adapter_config.json"))
    raise NotFoundError(f"starter_dir: no folder {name}, nor {name} under {', '.join(map(str, places.checkpoints))}")
