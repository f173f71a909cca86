"""timm's models as references, and small checkpoints in timm's format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
MEAN, STD = (0.48, 0.46, 0.41), (0.23, 0.22, 0.27)


class _AnyName(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Placeholder(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


@contextmanager
def _without_torchvision() -> Iterator[None]:
    # timm imports torchvision for data sets and for a layer that no ViT has. PyPI has no torchvision for a CPU torch,
    # and the one on PyPI breaks other packages. Placeholders are enough here.
    parts = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".utils")
    names = [f"torchvision{part}" for part in (*parts, ".models", ".models.feature_extraction")]
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: _Placeholder(name) for name in names})
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def vision_transformer() -> Any:
    """timm.models.vision_transformer; skips the test without timm."""
    with _without_torchvision():
        return pytest.importorskip("timm.models.vision_transformer")


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Change every parameter, including those that are initialised to 0 or 1.

    The seed gives the changes alone: what the parameters were before comes from torch's generator as it then was.
    """
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], name: str, **stated: object) -> Path:
    """A checkpoint in the format of timm's hub models."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = {"input_size": [3, 32, 32], "mean": list(MEAN), "std": list(STD), "crop_pct": 1.0, "tag": "ft_in1k"}
    config = {"architecture": name, "pretrained_cfg": trained, "model_args": {"img_size": 32, "num_heads": 4, **stated}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.detach().contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def small_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A ViT of two layers, 16 patches and width 16 with random weights, the same for a seed; needs no timm."""
    from shapeshift.token_adapt.checkpoints.weights import as_timm
    from shapeshift.token_adapt.model.architecture import Architecture
    from shapeshift.token_adapt.model.vision_transformer import UnifiedViT

    architecture = Architecture(
        image_size=32, patch_size=8, width=16, depth=2, heads=4, mlp_width=32, mean=MEAN, std=STD
    )
    torch.manual_seed(seed)
    model = UnifiedViT(architecture)
    randomise(model, seed)
    return write_checkpoint(folder, as_timm(model), "vit_small_test")
