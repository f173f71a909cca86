"""Checkpoints of timm's ViT and DeiT: config.json, and what timm's code knows by the architecture's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.checkpoints.description import (
    Classifier,
    Description,
    require_positions,
    require_stated,
    sizes,
    square_edge,
    table,
    three_numbers,
)
from shapeshift.token_adapt.checkpoints.labels import read_labels
from shapeshift.token_adapt.checkpoints.tensor_names import TIMM, Shapes, TensorNames
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.manifest import Preprocessing

FAMILY = "ViT and DeiT of timm"
# What shapes do not show, by the first pattern in the architecture's name that fits.
_HEADS = {"giant.*(dinov2|tipsv2|radio)": 24, "huge|giant|gigantic|so400m": 16, "base_patch16_gap_224": 16}
_ACTIVATIONS = {
    "quickgelu": "quick_gelu",
    "base_patch32_siglip|large_patch16_siglip.*_512|giantopt|so400m_patch16_siglip": "gelu_tanh",
}
_EPSILONS = {"_clip_": 1e-5}
# Their tensors are those of a ViT, and they compute something else.
_OTHERS = "_rpn_|_rope_|relpos_|_pe_|_dinov3|_lingbot|_sapiens2|_mci_|_xp_|_18x2_|pwee_"
# Arguments of a model that shapes show, that are read here, or that change nothing when a model serves.
_KNOWN_ARGS = re.compile(
    "img_size|patch_size|embed_dim|depth|num_heads|mlp_ratio|num_classes|global_pool|class_token|reg_tokens|in_chans|"
    "no_embed_class|pre_norm|fc_norm|final_norm|qkv_bias|qk_norm|init_values|dynamic_img_size|act_layer|weight_init|"
    ".*drop.*rate"
)
_POOLS = {"token": {}, "avg": {"pooled": 0, "pooled_patches": True}, "map": {"pooled": 0}}
_EDGES = {"center": "shortest", "squash": "both", "border": "longest"}
_FILTERS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming")
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def describe(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> Description:
    """The checkpoint in `folder`. Raises InvalidInputError or UnsupportedError naming the field."""
    name = str(config.get("architecture", ""))
    args, trained = table(config, "model_args"), table(config, "pretrained_cfg")
    _check(name, args)
    backbone: Shapes = {key: shape for key, shape in shapes.items() if key.split(".")[0] not in ("head", "head_dist")}
    heads = tuple(head for head in ("head", "head_dist") if f"{head}.weight" in shapes)
    names = TIMM
    if heads and "_clip_" in name and "ft" not in str(trained.get("tag", "")).split("_"):
        # Trained against texts, not labels: the head is the projection into the space that they share.
        names, backbone, heads = replace(TIMM, outer={**TIMM.outer, "projection": ("head",)}), dict(shapes), ()
    architecture = _architecture(name, config, args, trained, names, backbone, "head_dist" in heads)
    require_positions(names, shapes, architecture, architecture.image_size)
    classifier = None
    if heads:
        count = shapes["head.weight"][0]
        names_of_labels = config.get("label_names", trained.get("label_names"))
        classifier = Classifier(heads, read_labels(folder, names_of_labels, "label_names", count, "{}"))
    preprocessing = _preprocessing(trained, architecture.image_size)
    return Description(FAMILY, architecture, preprocessing, names, "", classifier, architecture.image_size)


def _check(name: str, args: Mapping[str, Any]) -> None:
    if not name.startswith(("vit_", "deit")) or re.search(_OTHERS, name):
        raise UnsupportedError(
            f"config.json: architecture: got {name!r}; a vit_* or deit* of timm with learned positions"
        )
    other = [key for key in args if not _KNOWN_ARGS.fullmatch(key)]
    if other:
        raise UnsupportedError(f"config.json: model_args.{other[0]}: got {args[other[0]]!r}; not supported")


def _architecture(
    name: str,
    config: Mapping[str, Any],
    args: Mapping[str, Any],
    trained: Mapping[str, Any],
    names: TensorNames,
    shapes: Shapes,
    distilled: bool,
) -> Architecture:
    dims = sizes(names, shapes)
    require_stated(args, {"patch_size": dims["patch_size"], "depth": dims["depth"], "embed_dim": dims["width"]})
    edge = args.get("img_size") or list(trained.get("input_size") or (3, 224, 224))[1:]
    image_size = square_edge("config.json: img_size or pretrained_cfg.input_size", edge)
    pool = args.get("global_pool", config.get("global_pool", "map" if dims["attention_pool"] else "token"))
    if pool not in _POOLS or (pool == "map") != dims["attention_pool"]:
        allowed = f"one of {', '.join(_POOLS)}, as the tensors show"
        raise UnsupportedError(f"config.json: global_pool: got {pool!r}; {allowed}")
    activation = args.get("act_layer") or _by_name(_ACTIVATIONS, name, "gelu")
    pooled: dict[str, Any] = {"pooled": 1 + distilled, **_POOLS[pool]}
    return Architecture(
        image_size=image_size,
        heads=_num_heads(name, args, dims["width"]),
        activation="gelu" if dims["gated"] else str(activation).replace("quickgelu", "quick_gelu"),
        epsilon=_by_name(_EPSILONS, name, 1e-6),
        mean=three_numbers("config.json: pretrained_cfg.mean", trained.get("mean", _IMAGENET["mean"])),
        std=three_numbers("config.json: pretrained_cfg.std", trained.get("std", _IMAGENET["std"])),
        **dims,
        **pooled,
    )


def _num_heads(name: str, args: Mapping[str, Any], width: int) -> int:
    heads = args.get("num_heads") or _by_name(_HEADS, name, None)
    if heads is None and width % 64:
        raise InvalidInputError("config.json: model_args.num_heads", None, f"required for a width of {width}")
    return int(heads or width // 64)


def _by_name(choices: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    return next((value for pattern, value in choices.items() if re.search(pattern, name)), otherwise)


def _preprocessing(trained: Mapping[str, Any], size: int) -> Preprocessing:
    """As timm's transform for evaluation: what is not stated has timm's default."""
    crop, mode = trained.get("crop_pct") or 0.875, trained.get("crop_mode") or "center"
    chosen = str(trained.get("interpolation") or "bicubic")
    if mode not in _EDGES or chosen not in _FILTERS or not isinstance(crop, int | float) or not 0 < crop <= 1:
        raise UnsupportedError(
            f"config.json: pretrained_cfg: crop_mode {mode}, interpolation {chosen}, crop_pct {crop}; allowed: "
            f"{', '.join(_EDGES)}; {', '.join(_FILTERS)}; above 0 to 1"
        )
    mean = three_numbers("config.json: pretrained_cfg.mean", trained.get("mean", _IMAGENET["mean"]))
    red, green, blue = (round(255 * value) for value in mean)
    return Preprocessing(size, _EDGES[mode], int(size / crop), chosen, border=(red, green, blue))
