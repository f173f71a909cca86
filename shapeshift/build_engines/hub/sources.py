"""What a `checkpoint` or an adapter names: a folder, a file, or a repository of the hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shapeshift.build_engines.hub import needed_files
from shapeshift.build_engines.hub.download import HubId, Source, fetch
from shapeshift.build_engines.image import onnx_checkpoint
from shapeshift.build_engines.model_folder import CONFIG
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines import checkpoint
from shapeshift.engines.gguf import folder as gguf
from shapeshift.engines.gguf.files import SUFFIX
from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.triton import model_config

_GGUF = "gguf"
"""The folder of the checkpoint folders of GGUF models, in the build folder: what is mounted beside a server."""
FILES = (SUFFIX, onnx_checkpoint.SUFFIX)
"""Endings of the files that stand for checkpoints."""


def find_checkpoint(name: str, paths: BuildPaths) -> Source:
    """The checkpoint `name`: a folder, as `checkpoint.find_folder`, a GGUF or ONNX file there, or a hub id, as
    `HubId.parse`. Of such a file, or a folder that holds one and no other weights, the build folder gets a folder.

    Raises NotFoundError naming the folders that were searched, and the errors of `fetch`, `gguf.folder.write` and
    `onnx_checkpoint.as_folder`.
    """
    source, file = _named(name, paths)
    if file is None:
        return source
    if file.suffix == onnx_checkpoint.SUFFIX:
        return Source(onnx_checkpoint.as_folder(file, paths.build), source.origin)
    return Source(gguf.write(file, paths.checkpoints[0] / _GGUF), source.origin)


def file_of(place: Path) -> Path | None:
    """The GGUF or ONNX file that `place` is, or that a folder without other weights holds; None: it is none."""
    if place.is_dir():
        return onnx_checkpoint.find(place) or gguf.file_in(place)
    return place if place.is_file() and place.name.endswith(FILES) else None


def remove_former(paths: BuildPaths) -> None:
    """Remove the folders of former contents of GGUF files, but those that a generated model names."""
    used = set()
    try:
        for file in paths.generated.glob(f"*/{CONFIG}"):
            checkpoint = model_config.parameters(model_config.read(file)).get("checkpoint", "")
            used.add((file.parent / checkpoint).resolve())
    except ShapeshiftError:
        # What a model names that cannot be read is unknown: all stay.
        return
    gguf.remove_former(paths.checkpoints[0] / _GGUF, used)


def _named(name: str, paths: BuildPaths) -> tuple[Source, Path | None]:
    """The folder that `name` stands for, and the GGUF or ONNX file there; None: it has none."""
    folder = checkpoint.find_folder(name, paths.checkpoints)
    if folder is not None:
        return Source(folder), file_of(folder)
    if name.endswith(FILES) and (file := checkpoint.find_file(name, paths.checkpoints)) is not None:
        return Source(file.parent), file
    hub_id = HubId.parse(name)
    if hub_id is None:
        raise checkpoint.not_found(name, paths.checkpoints)
    source = fetch(hub_id, partial(needed_files.of_checkpoint, variant=hub_id.variant), paths.build)
    return source, gguf.file_in(source.folder, hub_id.variant)


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
