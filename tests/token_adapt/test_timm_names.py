"""What timm's code knows of a model by its name alone: every ViT and DeiT of its registry, or its refusal."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.errors import ShapeshiftError
from shapeshift.token_adapt.checkpoints import timm as described
from tests.token_adapt.timm_models import vision_transformer

ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}


@pytest.mark.long
def test_every_name_is_described_as_timm_builds_it(tmp_path: Path) -> None:
    """Models whose computation differs in more than the description covers must be refused, not computed wrongly."""
    vision_transformer()
    timm = importlib.import_module("timm")
    served, refused, wrong = [], [], []
    for name in timm.list_models():
        if not name.startswith(("vit_", "deit")):
            continue
        try:
            with torch.device("meta"):
                theirs = timm.create_model(name)
        except RuntimeError:
            # Some layers cannot be made without memory; none of them is served.
            continue
        try:
            shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
            config = {"architecture": name, "pretrained_cfg": dict(theirs.pretrained_cfg)}
            config["global_pool"] = getattr(theirs, "global_pool", None)
            ours = described.describe(tmp_path, config, shapes).architecture
        except ShapeshiftError:
            refused.append(name)
            continue
        served.append(name)
        wanted = (ours.heads, ours.epsilon, "silu" if ours.gated else ours.activation, "Block")
        if read_of(theirs) != wanted:
            wrong.append((name, read_of(theirs), wanted))
    assert wrong == []
    assert len(served) > 100 and "vit_base_patch16_rpn_224" in refused


def read_of(model: Any) -> tuple[Any, ...]:
    """Heads, epsilon, activation and class of the first block."""
    block = model.blocks[0]
    activation = type(block.mlp.act).__name__
    name = ACTIVATIONS.get(activation, activation.lower())
    return block.attn.num_heads, block.norm1.eps, name, type(block).__name__
