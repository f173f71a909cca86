"""Checkpoints of timm's ViT and DeiT: same outputs as timm's models, or a coded error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.checkpoints import timm
from shapeshift.token_adapt.checkpoints.weights import as_timm, read_model
from shapeshift.token_adapt.model.schedule import expand
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT
from tests.token_adapt.timm_models import (
    MEAN,
    SMALL,
    STD,
    randomise,
    small_checkpoint,
    vision_transformer,
    write_checkpoint,
)

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("vit_small_patch8_32", {}),
    ("vit_small_patch8_32", {"global_pool": "avg"}),
    ("vit_small_patch8_32", {"global_pool": "avg", "class_token": False, "fc_norm": False}),
    ("vit_small_patch8_reg2_32", {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.5}),
    ("vit_small_patch8_reg2_32", {"reg_tokens": 2, "qk_norm": True}),
    ("vit_small_patch8_clip_32", {"pre_norm": True, "norm_layer": torch.nn.LayerNorm}),
    ("vit_small_patch8_32", {"qkv_bias": False}),
    ("deit3_small_patch8_32", {"no_embed_class": True, "init_values": 1e-2}),
]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_same_numbers_as_timm(tmp_path: Path, name: str, variant: dict[str, Any]) -> None:
    theirs = vision_transformer().VisionTransformer(**SMALL, **variant).eval()
    randomise(theirs)
    pool = {"global_pool": variant["global_pool"]} if "global_pool" in variant else {}
    ours, weight, bias = read_model(write_checkpoint(tmp_path, theirs.state_dict(), name, **pool))
    assert_same(theirs, ours, weight, bias)


def test_a_distilled_deit(tmp_path: Path) -> None:
    vision_transformer()
    from timm.models.deit import VisionTransformerDistilled

    theirs = VisionTransformerDistilled(**SMALL).eval()
    randomise(theirs)
    ours, weight, bias = read_model(write_checkpoint(tmp_path, theirs.state_dict(), "deit_small_distilled_patch8_32"))
    assert ours.architecture.features == 64
    assert_same(theirs, ours, weight, bias)


def assert_same(theirs: Any, ours: UnifiedViT, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    pixels = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8)
    normal = (pixels / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert weight is not None and bias is not None
    with torch.inference_mode():
        wanted = theirs(normal.permute(0, 3, 1, 2))
        got = ours(pixels, expand(0, ours.architecture.patches, ours.architecture.depth)) @ weight.T + bias
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_written_checkpoint_is_read_back(tmp_path: Path) -> None:
    small_checkpoint(tmp_path)
    model, weight, _ = read_model(tmp_path)
    assert weight is None and model.architecture.mean == MEAN
    written = load_file(tmp_path / "model.safetensors")
    normal = torch.rand(2, 32, 32, 3)
    own = UnifiedViT(model.architecture)
    own.load_state_dict(model.state_dict())
    repeats = torch.tensor(STD).repeat(64)
    own.patch.weight.data = own.patch.weight.data * 255 * repeats
    own.patch.bias.data = own.patch.bias.data + own.patch.weight.data @ (torch.tensor(MEAN).repeat(64) / repeats)
    again = as_timm(own)
    assert again.keys() == written.keys()
    for name in ("patch_embed.proj.weight", "patch_embed.proj.bias", "blocks.1.mlp.fc2.weight"):
        torch.testing.assert_close(again[name], written[name], rtol=1e-4, atol=1e-5)
    layers = expand(0, 16, 2)
    pixels = 255 * (normal * torch.tensor(STD) + torch.tensor(MEAN))
    torch.testing.assert_close(own.eval()(normal, layers), model(pixels, layers), rtol=1e-4, atol=1e-4)


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("an extra tensor", {"tensors": {"blocks.0.mlp.w12.weight": torch.zeros(2)}}, "w12"),
    ("a missing tensor", {"without": "blocks.1.norm2.bias"}, r"blocks\.1\.norm2\.bias.*missing"),
    ("no patches", {"without": "patch_embed.proj.weight"}, "patch_embed"),
    ("a wrong shape", {"tensors": {"blocks.1.mlp.fc2.weight": torch.zeros(16, 31)}}, "fc2"),
    ("positions of other images", {"stated": {"img_size": 64}}, "pos_embed"),
    ("an indivisible number of heads", {"stated": {"num_heads": 3}}, "num_heads"),
    ("an unknown number of heads", {"stated": {"num_heads": None}}, "num_heads"),
    ("another architecture", {"name": "resnet50"}, "architecture"),
    ("other positions", {"name": "vit_base_patch16_rpn_224"}, "architecture"),
    ("an argument that changes the model", {"stated": {"pool_include_prefix": True}}, "pool_include_prefix"),
    ("quantised weights", {"tensors": {"blocks.1.norm2.bias": torch.zeros(16, dtype=torch.int8)}}, "I8.*quantised"),
    ("attention pooling", {"stated": {"global_pool": "map"}}, "global_pool"),
]


@pytest.mark.parametrize(("what", "change", "names"), BROKEN, ids=[one[0] for one in BROKEN])
def test_errors_name_the_unsupported_part(tmp_path: Path, what: str, change: dict[str, Any], names: str) -> None:
    small_checkpoint(tmp_path)
    tensors = {**load_file(tmp_path / "model.safetensors"), **change.get("tensors", {})}
    tensors.pop(change.get("without", ""), None)
    write_checkpoint(tmp_path, tensors, change.get("name", "vit_small_test"), **change.get("stated", {}))
    with pytest.raises((InvalidInputError, UnsupportedError), match=names):
        read_model(tmp_path)


def test_standard_models_need_no_num_heads(tmp_path: Path) -> None:
    block = {"norm1.weight": (768,), "mlp.fc1.weight": (3072, 768), "mlp.fc2.weight": (768, 3072)}
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (768, 3, 16, 16),
        "cls_token": (1, 1, 768),
        "pos_embed": (1, 197, 768),
        "norm.weight": (768,),
    }
    shapes |= {f"blocks.{index}.{name}": shape for index in range(12) for name, shape in block.items()}
    made = timm.describe(tmp_path, {"architecture": "vit_base_patch16_224"}, shapes)
    own = made.architecture
    assert (own.heads, own.depth, own.patches, own.image_size, own.pooled) == (12, 12, 196, 224, 1)
    # What timm takes where the configuration is silent.
    assert own.mean == (0.485, 0.456, 0.406) and made.preprocessing.resized == 256
