"""timm's ViT and DeiT checkpoints: what config.json and the shapes of the tensors say about the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.architecture import Architecture

Shapes = Mapping[str, tuple[int, ...]]

# Tokens before the patches in timm's order, each with the tensor that holds it.
PREFIXES = ("cls_token", "dist_token", "reg_token")
# Models whose heads are not 64 wide, by a part of the architecture's name.
_HEADS = {"huge": 16, "giant": 16, "gigantic": 16, "so400m": 16}
_BLOCK = "blocks.0."


def read_architecture(config: Mapping[str, Any], shapes: Shapes) -> Architecture:
    """The architecture of a timm checkpoint. Raises InvalidInputError or UnsupportedError naming what does not fit."""
    name = str(config.get("architecture", ""))
    if not name.startswith(("vit_", "deit")) or "quickgelu" in name:
        raise UnsupportedError(f"architecture: got {name!r}; a vit_* or deit* of timm with GELU")
    stated, trained = dict(config.get("model_args") or {}), dict(config.get("pretrained_cfg") or {})
    width, _, patch_size, side = _shape(shapes, "patch_embed.proj.weight", 4)
    depth = 1 + max((int(key.split(".")[1]) for key in shapes if key.startswith("blocks.")), default=-1)
    image_size = stated.get("img_size") or (trained.get("input_size") or (3, 224, 224))[-1]
    pool = stated.get("global_pool", config.get("global_pool", "token"))
    if not isinstance(image_size, int) or side != patch_size or pool not in ("token", "avg"):
        wanted = "square images and patches, and global_pool token or avg"
        raise UnsupportedError(f"img_size {image_size}, global_pool {pool}: {wanted}")
    made = Architecture(
        image_size=image_size,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=_heads(name, stated, width),
        mlp_width=_shape(shapes, f"{_BLOCK}mlp.fc1.weight", 2)[0],
        prefix=sum(shapes[key][1] for key in PREFIXES if key in shapes),
        pooled=0 if pool == "avg" else 1 + ("head_dist.weight" in shapes),
        qkv_bias=f"{_BLOCK}attn.qkv.bias" in shapes,
        qk_norm=f"{_BLOCK}attn.q_norm.weight" in shapes,
        norm_first="norm_pre.weight" in shapes,
        norm_last="norm.weight" in shapes,
        norm_pooled="fc_norm.weight" in shapes,
        gated=f"{_BLOCK}ls1.gamma" in shapes,
        epsilon=1e-5 if "_clip_" in name else 1e-6,
        mean=_channels(trained, "mean"),
        std=_channels(trained, "std"),
    )
    places = _shape(shapes, "pos_embed", 3)[1]
    if places not in (made.patches, made.patches + made.prefix):
        allowed = f"{made.patches} positions, or {made.patches + made.prefix}, for images of {image_size}"
        raise InvalidInputError("pos_embed", places, allowed)
    return made


def _shape(shapes: Shapes, name: str, axes: int) -> tuple[int, ...]:
    if len(shapes.get(name, ())) != axes:
        raise UnsupportedError(f"checkpoint: no tensor {name} of {axes} axes, as timm's ViT and DeiT have")
    return shapes[name]


def _heads(name: str, stated: Mapping[str, Any], width: int) -> int:
    known = stated.get("num_heads") or next((heads for part, heads in _HEADS.items() if part in name), None)
    if known is None and width % 64:
        raise InvalidInputError("model_args.num_heads", None, f"must be stated for a width of {width}")
    return int(known or width // 64)


def _channels(trained: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = tuple(float(value) for value in trained.get(name, (0.5, 0.5, 0.5)))
    if len(values) != 3 or (name == "std" and min(values) <= 0):
        raise InvalidInputError(f"pretrained_cfg.{name}", values, "three numbers, for red, green and blue")
    return values[0], values[1], values[2]
