"""The architecture of timm's ViT and DeiT checkpoints, from config.json and the tensor shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.model.architecture import Architecture

Shapes = Mapping[str, tuple[int, ...]]

# Tensors of the tokens before the patches, in timm's order.
PREFIXES = ("cls_token", "dist_token", "reg_token")
# Number of heads by a part of the architecture's name; all other models have heads of width 64.
_HEADS = {"huge": 16, "giant": 16, "gigantic": 16, "so400m": 16}
_BLOCK = "blocks.0."


def read_architecture(config: Mapping[str, Any], shapes: Shapes) -> Architecture:
    """The architecture of a checkpoint. Raises InvalidInputError or UnsupportedError naming the unsupported field."""
    name = str(config.get("architecture", ""))
    if not name.startswith(("vit_", "deit")) or "quickgelu" in name:
        raise UnsupportedError(f"architecture: got {name!r}; a vit_* or deit* of timm with GELU")
    model_args, pretrained = dict(config.get("model_args") or {}), dict(config.get("pretrained_cfg") or {})
    width, _, patch_size, side = _shape(shapes, "patch_embed.proj.weight", 4)
    depth = 1 + max((int(key.split(".")[1]) for key in shapes if key.startswith("blocks.")), default=-1)
    image_size = model_args.get("img_size") or (pretrained.get("input_size") or (3, 224, 224))[-1]
    pool = model_args.get("global_pool", config.get("global_pool", "token"))
    if not isinstance(image_size, int) or side != patch_size or pool not in ("token", "avg"):
        allowed = "square images and patches, and global_pool token or avg"
        raise UnsupportedError(f"img_size {image_size}, global_pool {pool}; allowed: {allowed}")
    architecture = Architecture(
        image_size=image_size,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=_heads(name, model_args, width),
        mlp_width=_shape(shapes, f"{_BLOCK}mlp.fc1.weight", 2)[0],
        prefix=sum(shapes[key][1] for key in PREFIXES if key in shapes),
        pooled=0 if pool == "avg" else 1 + ("head_dist.weight" in shapes),
        qkv_bias=f"{_BLOCK}attn.qkv.bias" in shapes,
        qk_norm=f"{_BLOCK}attn.q_norm.weight" in shapes,
        norm_pre="norm_pre.weight" in shapes,
        norm_final="norm.weight" in shapes,
        norm_pooled="fc_norm.weight" in shapes,
        layer_scale=f"{_BLOCK}ls1.gamma" in shapes,
        epsilon=1e-5 if "_clip_" in name else 1e-6,
        mean=_channels(pretrained, "mean"),
        std=_channels(pretrained, "std"),
    )
    positions, patches = _shape(shapes, "pos_embed", 3)[1], architecture.patches
    if positions not in (patches, patches + architecture.prefix):
        allowed = f"{patches} or {patches + architecture.prefix} positions for images of size {image_size}"
        raise InvalidInputError("pos_embed", positions, allowed)
    return architecture


def _shape(shapes: Shapes, name: str, axes: int) -> tuple[int, ...]:
    if len(shapes.get(name, ())) != axes:
        raise UnsupportedError(f"checkpoint: no tensor {name} with {axes} axes; timm's ViT and DeiT have one")
    return shapes[name]


def _heads(name: str, model_args: Mapping[str, Any], width: int) -> int:
    heads = model_args.get("num_heads") or next((heads for part, heads in _HEADS.items() if part in name), None)
    if heads is None and width % 64:
        raise InvalidInputError("model_args.num_heads", None, f"required for a width of {width}")
    return int(heads or width // 64)


def _channels(pretrained: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = tuple(float(value) for value in pretrained.get(name, (0.5, 0.5, 0.5)))
    if len(values) != 3 or (name == "std" and min(values) <= 0):
        raise InvalidInputError(f"pretrained_cfg.{name}", values, "three numbers, for red, green and blue")
    return values[0], values[1], values[2]
