"""What a `checkpoint` or an adapter names: a folder, or a repository of the hub."""

from __future__ import annotations

from pathlib import Path

from shapeshift.build_engines.hub import needed_files
from shapeshift.build_engines.hub.download import HubId, Source, fetch
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines import checkpoint
from shapeshift.errors import NotFoundError


def find_checkpoint(name: str, paths: BuildPaths) -> Source:
    """The checkpoint `name`: a folder, as `checkpoint.find_folder`, or owner/model or owner/model@revision of the hub.

    Raises NotFoundError naming the folders that were searched, and the errors of `fetch`.
    """
    folder = checkpoint.find_folder(name, paths.checkpoints)
    if folder is not None:
        return Source(folder)
    hub_id = HubId.parse(name)
    if hub_id is None:
        raise checkpoint.not_found(name, paths.checkpoints)
    return fetch(hub_id, needed_files.of_checkpoint, paths.build)


def find_adapter(name: str, build: Path) -> Source:
    """The PEFT adapter `name`: a folder, or owner/adapter or owner/adapter@revision of the hub. Raises as above."""
    if Path(name).is_dir():
        return Source(Path(name))
    hub_id = HubId.parse(name)
    if hub_id is None:
        raise NotFoundError(f"adapter: no folder {name}; give a folder or the id of a hub, such as owner/adapter")
    return fetch(hub_id, needed_files.of_adapter, build)


def base_names(checkpoint_name: str, folder: Path, further: str) -> set[str]:
    """The names under which adapters may state the model in `folder` as their base model.

    checkpoint_name: what config.pbtxt names; further: the setting `base_names`.
    """
    hub_id = None if Path(checkpoint_name).is_dir() else HubId.parse(checkpoint_name)
    plain = hub_id.repository if hub_id else checkpoint_name
    return {checkpoint_name, plain, Path(plain).name, folder.name, *filter(None, further.split(","))}
