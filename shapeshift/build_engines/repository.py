"""The front models of the model repository."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from shapeshift.build_engines import cascade, decode
from shapeshift.build_engines.image import front as image_front
from shapeshift.build_engines.image.plan import EmulatedFrontConfig, ImageFrontConfig
from shapeshift.build_engines.model_folder import CONFIG
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.text import front as text_front
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.engines import hardware
from shapeshift.errors import InvalidInputError, NotFoundError, did_you_mean
from shapeshift.triton import model_config

FrontConfig: TypeAlias = (
    TextFrontConfig | decode.DecodeFrontConfig | ImageFrontConfig | EmulatedFrontConfig | cascade.CascadeFrontConfig
)

_READERS: dict[str, Callable[[Path, Any, Mapping[str, str]], FrontConfig]] = {
    text_front.BACKEND: text_front.read,
    decode.BACKEND: decode.read,
    decode.WITH_ADAPTERS: decode.read,
    image_front.BACKEND: image_front.read,
    cascade.BACKEND: cascade.read,
}


def front_models(paths: BuildPaths, only: set[str]) -> list[FrontConfig]:
    """The fronts of the repository, or those named in `only`. Raises the error of the first that cannot be read."""
    return [read(folder) for folder in front_folders(paths, only)]


def front_folders(paths: BuildPaths, only: set[str]) -> list[Path]:
    """The folders of the fronts of the repository, or of those named in `only`.

    Raises NotFoundError for an unknown name, or if there is none.
    """
    folders = sorted(path.parent for path in paths.repository.glob(f"*/{CONFIG}"))
    names = [folder.name for folder in folders]
    for name in sorted(only.difference(names)):
        if (paths.repository / name).is_dir():
            raise NotFoundError(f"{paths.repository / name} has no {CONFIG}, so it is no model")
        if folders:
            near = did_you_mean(name, names) or ";"
            raise NotFoundError(f"no model {name} in {paths.repository}{near} there are: {', '.join(names)}")
    if not folders:
        raise NotFoundError(f"no model in {paths.repository}: a model is a folder with a {CONFIG}")
    return [folder for folder in folders if not only or folder.name in only]


def read(folder: Path) -> FrontConfig:
    """The front in `folder`. Raises InvalidInputError naming the field."""
    config = model_config.read(folder / CONFIG)
    if config.name and config.name != folder.name:
        raise InvalidInputError("name", config.name, f"the folder's name, {folder.name}")
    values = model_config.parameters(config)
    if any(group.kind == type(group).KIND_GPU for group in config.instance_group) and not hardware.gpus():
        raise InvalidInputError("instance_group kind", "KIND_GPU", "KIND_CPU: this machine shows no NVIDIA GPU")
    if config.backend not in _READERS:
        raise InvalidInputError("backend", config.backend, f"one of {', '.join(sorted(_READERS))}")
    return _READERS[config.backend](folder, config, values)
