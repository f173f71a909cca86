"""From a checkpoint's folder to its description: timm's name an architecture, those of transformers a model_type.

The libraries themselves do not read it. timm requires torchvision, which PyPI has only for a torch with CUDA:
installing it replaces the CPU's torch. Their models would still need the tables of names, since `UnifiedViT` has other
tensors, and they fill in what a checkpoint lacks, where this package names the file and the field. Tests hold the
answers of both against ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shapeshift.engines import weight_headers
from shapeshift.engines.checkpoint import Checkpoint, open_checkpoint
from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.checkpoints import huggingface, processors, timm
from shapeshift.token_adapt.checkpoints.description import Description

_CONFIG = "config.json"


def open_vision(folder: Path, origin: str = "", hashes: Path | None = None) -> tuple[Checkpoint, Description]:
    """The checkpoint in `folder`, hashed, and what it holds. origin, hashes: as for `open_checkpoint`.

    Raises the errors of `open_checkpoint` and `describe`.
    """
    checkpoint = open_checkpoint(folder, (_CONFIG, *_processor_files(folder)), origin, hashes)
    return checkpoint, describe(checkpoint)


def _processor_files(folder: Path) -> Sequence[str]:
    """What else the features depend on: timm's config.json states its images itself."""
    return [name for name in processors.FILES if (folder / name).is_file()][:1]


def describe(checkpoint: Checkpoint) -> Description:
    """What the checkpoint holds. Raises InvalidInputError or UnsupportedError naming file and field."""
    config = checkpoint.config
    if not isinstance(config, dict) or not {"architecture", "model_type"} & set(config):
        raise InvalidInputError(
            f"checkpoint: {checkpoint.folder / _CONFIG}", None, "architecture (timm) or model_type (transformers)"
        )
    headers = weight_headers.read(checkpoint.folder)
    shapes = {name: header.shape for name, header in headers.items()}
    read = timm.describe if "architecture" in config else huggingface.describe
    described = read(checkpoint.folder, config, shapes)
    weight_headers.require_floats({name: header for name, header in headers.items() if name.startswith(described.root)})
    return described
