"""The options --model, --build and --dir of the commands that work on one generated front model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from shapeshift.errors import NotFoundError
from shapeshift.registry import require_folder
from shapeshift.triton import model_config


def add_arguments(
    parser: argparse.ArgumentParser, actions: Sequence[argparse.ArgumentParser], default_model: str
) -> None:
    """Declare --model, --build and --dir on a command and its actions: they may stand before or after the action."""
    for one in (parser, *actions):
        # An action sets only what is given after it.
        model, build, registry = (default_model, Path("build"), "") if one is parser else [argparse.SUPPRESS] * 3
        one.add_argument("--model", default=model, help=f"the front model ({default_model})")
        one.add_argument("--build", type=Path, default=build, metavar="DIR", help="folder of generated files (build)")
        one.add_argument("--dir", default=registry, metavar="DIR", help="another registry than that of the model")


def read(options: argparse.Namespace) -> tuple[Path, dict[str, str]]:
    """The generated folder of the model, and the parameters of its config.pbtxt.

    Raises NotFoundError if the build folder lacks it, ShapeshiftError for invalid text.
    """
    folder: Path = options.build / "repository" / options.model
    config = folder / "config.pbtxt"
    if not config.is_file():
        raise NotFoundError(
            f"model: no {config}; run `shapeshift engines`, or from another folder name the build folder with --build"
        )
    return folder, dict(model_config.parameters(model_config.read(config)))


def registry_folder(options: argparse.Namespace, folder: Path, values: Mapping[str, str], field: str) -> Path:
    """The registry that --dir names, or that the parameter `field` of the model in `folder` names."""
    return Path(require_folder("dir", options.dir)) if options.dir else (folder / values[field]).resolve()
