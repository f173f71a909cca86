"""The unified model: prompts as tokens, merging, pooling, and folding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.token_adapt.model import vision_transformer
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.schedule import expand
from shapeshift.token_adapt.model.vision_model import PromptFolding
from shapeshift.token_adapt.model.vision_transformer import Block, UnifiedViT
from tests.token_adapt.timm_models import randomise

SIZES = {"image_size": 32, "patch_size": 8, "width": 24, "depth": 3, "heads": 3, "mlp_width": 48}
POOLS: list[dict[str, Any]] = [
    {},
    {"pooled": 0, "pooled_patches": True},
    {"pooled": 0, "attention_pool": True},
    {"pooled_patches": True},
]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"qk_norm": True, "layer_scale": True},
    {"qkv_bias": False, "norm_pre": True, **POOLS[1]},
    {"gated": True, "projection": 8},
    {"activation": "quick_gelu", **POOLS[2]},
]


def model_of(**variant: object) -> UnifiedViT:
    model = UnifiedViT(Architecture(**SIZES, **variant)).eval()  # type: ignore[arg-type]
    randomise(model)
    return model.requires_grad_(False)


def plain_block(block: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """A textbook block over one image [t, width]; each token counts `sizes` times."""
    attention = block.attention
    q, k, v = (
        part.view(len(x), attention.heads, -1).transpose(0, 1) for part in attention.qkv(block.norm1(x)).chunk(3, 1)
    )
    q, k = attention.q_norm(q), attention.k_norm(k)
    weights = (q @ k.transpose(1, 2) / attention.head_width**0.5).exp() * sizes
    out = attention.proj((weights / weights.sum(2, keepdim=True) @ v).transpose(0, 1).reshape(x.shape))
    x = x + (out if block.scale1 is None else out * block.scale1)
    out = block.mlp(block.norm2(x))
    return x + (out if block.scale2 is None else out * block.scale2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_are_tokens_whose_output_is_dropped(variant: dict[str, object]) -> None:
    model = model_of(**variant)
    prompts, pixels = torch.randn(2, 3, 5, 24), torch.rand(2, 32, 32, 3)
    got = model(pixels, expand(5, 16, 3), model.fold(prompts))
    for image in range(2):
        x = model.norm_pre(torch.cat((model.prefix[0], model.embed(pixels)[image])))
        for index, block in enumerate(model.blocks):
            x = plain_block(block, torch.cat((x, prompts[image, index])), torch.ones(17 + 5))[:17]
        torch.testing.assert_close(got[image], model._pool(x[None], None)[0], rtol=1e-4, atol=1e-5)


def test_block_inputs_lead_to_the_features() -> None:
    model = model_of()
    pixels = torch.rand(2, 32, 32, 3)
    block_inputs = model.block_inputs(pixels)
    assert [tokens.shape for tokens in block_inputs] == [(2, 17, 24)] * 3
    for block, before, after in zip(model.blocks, block_inputs, block_inputs[1:], strict=False):
        torch.testing.assert_close(plain_block(block, before[1], torch.ones(17)), after[1], rtol=1e-4, atol=1e-5)
    last, *_ = model.blocks[-1](block_inputs[-1], None, None, None, 0)
    torch.testing.assert_close(model._pool(last, None), model(pixels, expand(0, 16, 3)))


def test_merged_tokens_count_once_per_patch() -> None:
    model = model_of()
    block, x = model.blocks[0], torch.randn(1, 6, 24)
    sizes = torch.tensor([[1.0, 2.0, 1.0, 3.0, 1.0, 1.0]])
    got, *_ = block(x, sizes, None, None, 0)
    torch.testing.assert_close(got[0], plain_block(block, x[0], sizes[0]), rtol=1e-4, atol=1e-5)
    repeated = torch.repeat_interleave(x[0], sizes[0].long(), dim=0)
    alone = plain_block(block, repeated, torch.ones(len(repeated)))
    torch.testing.assert_close(got[0, 3], alone[5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pool", POOLS)
def test_merging_equal_patches_changes_nothing(pool: dict[str, Any]) -> None:
    """Merging pairs of equal patches does not change the features."""
    model = model_of(**pool)
    model.position.zero_()
    half = torch.rand(2, 8, 24)
    patches = torch.repeat_interleave(half, 2, dim=1)
    layers = [*expand(-8, 16, 1), *expand(0, 8, 2)]
    torch.testing.assert_close(
        model.encode(patches, layers), model.encode(patches, expand(0, 16, 3)), rtol=1e-4, atol=1e-5
    )


def test_merged_models_compute_the_scheduled_tokens() -> None:
    model = model_of()
    seen: list[int] = []
    for block in model.modules():
        if isinstance(block, Block):
            block.norm2.register_forward_hook(lambda _module, _given, out: seen.append(out.shape[1]))
    model(torch.rand(1, 32, 32, 3), expand(-5, 16, 3))
    assert seen == [1 + 11, 1 + 6, 1 + 3]


@pytest.mark.parametrize("variant", VARIANTS)
def test_folding_without_torch_matches(variant: dict[str, object], tmp_path: Path) -> None:
    model = model_of(**variant)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    vision_transformer.prompt_folding(state, 3, 3, model.architecture.epsilon).save(tmp_path)
    prompts = torch.randn(3, 5, 24)
    wanted = torch.cat(model.fold(prompts[None]))
    got = PromptFolding.load(tmp_path, 3, model.architecture.epsilon).fold(prompts.numpy())
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-5)
