"""Front models with other parameters, in repositories of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.common.output import BUILD, progress
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import read
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.build_engines.text.front import publish
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.triton import model_config

SHIPPED = Path("model_repository")
KERNELS = BUILD / "kernels"


def write_front(source: Path, folder: Path, parameters: Mapping[str, object], keeps: bool = True) -> None:
    """Write the front of the folder `source` as the model `folder`, with these parameters.

    keeps: whether it has the others of `source`, too.
    """
    config = model_config.read(source / "config.pbtxt")
    config.name = folder.name
    if not keeps:
        config.parameters.clear()
    for field, value in parameters.items():
        model_config.set_parameter(config, field, str(value))
    (folder / "1").mkdir(parents=True, exist_ok=True)
    model_config.write(config, folder / "config.pbtxt")


def build_encoder(place: Path, name: str, checkpoint: Path, parameters: Mapping[str, str]) -> BuildPaths:
    """Build a text model `name` over the checkpoint, with these parameters; where its engines and its front are."""
    source = place / "model_repository" / name
    write_front(SHIPPED / "encode", source, {"checkpoint": checkpoint.absolute(), **parameters}, keeps=False)
    (place / "build").mkdir(exist_ok=True)
    if not (kernels := place / "build" / "kernels").exists():
        kernels.symlink_to(KERNELS.absolute())
    paths = BuildPaths(place, place / "build", place / "model_repository")
    front = read(source)
    assert isinstance(front, TextFrontConfig)
    publish(front, paths, progress)
    return paths


def generator(checkpoint: Path, precision: str, slots: int, max_length: int) -> dict[str, object]:
    """The parameters of a front that generates, as `make engines` would complete them."""
    return {
        "checkpoint": checkpoint.resolve(),
        "checkpoint_sha256": open_checkpoint(checkpoint).sha256,
        "precision": precision,
        "kernel_cache": KERNELS.resolve(),
        "max_concurrency": slots,
        "max_length": max_length,
    }
