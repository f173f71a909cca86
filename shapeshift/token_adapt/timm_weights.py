"""timm's ViT and DeiT checkpoints: which tensor belongs where, read and written.

The model takes pixels in 0..255 as they are: what timm does to them first (scale, mean, deviation) is made part of
the patch embedding, and its convolution a linear layer over the numbers of a patch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.architecture import Architecture
from shapeshift.token_adapt.timm_config import PREFIXES, read_architecture
from shapeshift.token_adapt.unified import UnifiedViT

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

WEIGHTS_FILE = "model.safetensors"
# Modules of one block, ours and timm's; each has a weight and mostly a bias.
_BLOCK_PARTS = {
    "norm1": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.query_norm": "attn.q_norm",
    "attention.key_norm": "attn.k_norm",
    "attention.out": "attn.proj",
    "norm2": "norm2",
    "widen": "mlp.fc1",
    "narrow": "mlp.fc2",
}
_PARTS = {"first": "norm_pre", "last": "norm", "pooled": "fc_norm"}
_HEADS = ("head", "head_dist")


def read_model(folder: Path) -> tuple[UnifiedViT, Tensor | None, Tensor | None]:
    """The model in `folder` (config.json and model.safetensors), f32, and its head's weight and bias if it has one.

    Raises InvalidInputError for missing or misshapen tensors, UnsupportedError for an architecture or tensors
    that this model does not know.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: value.float() for name, value in load_file(folder / WEIGHTS_FILE).items()}
    made = read_architecture(config, {name: tuple(value.shape) for name, value in tensors.items()})
    weight, bias = _head({name: tensors.pop(name) for name in list(tensors) if name.split(".")[0] in _HEADS})
    model = UnifiedViT(made)
    _fill(model, tensors)
    return model.eval().requires_grad_(False), weight, bias


def _fill(model: UnifiedViT, tensors: dict[str, Tensor]) -> None:
    """Put every one of `tensors` into `model`; none may be left over or missing."""
    made = model.made
    state = {
        "patch.weight": _linear(tensors.pop("patch_embed.proj.weight")),
        "patch.bias": tensors.pop("patch_embed.proj.bias", torch.zeros(made.width)),
    }
    _take_pixels(state, made)
    state["prefix"], state["position"] = _positions(tensors, made)
    wanted = model.state_dict()
    for ours, theirs in _pairs(made):
        if ours in wanted:
            if theirs not in tensors:
                raise InvalidInputError("checkpoint", theirs, "this tensor is missing")
            state[ours] = tensors.pop(theirs)
    if tensors:
        raise UnsupportedError(f"checkpoint: tensors that timm's plain ViT and DeiT do not have: {sorted(tensors)[:3]}")
    for name, value in state.items():
        if value.shape != wanted[name].shape:
            raise InvalidInputError("checkpoint", f"{name} {tuple(value.shape)}", f"shape {tuple(wanted[name].shape)}")
    model.load_state_dict(state)


def _pairs(made: Architecture) -> list[tuple[str, str]]:
    """Names of parameters, ours and timm's, of everything but patches, prefix and positions."""
    found = [(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in _PARTS.items() for kind in ("weight", "bias")]
    for index in range(made.depth):
        parts = [(f"blocks.{index}.{ours}", f"blocks.{index}.{theirs}") for ours, theirs in _BLOCK_PARTS.items()]
        found += [(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in parts for kind in ("weight", "bias")]
        found += [(f"blocks.{index}.gate{branch}", f"blocks.{index}.ls{branch}.gamma") for branch in (1, 2)]
    return found


def _linear(convolution: Tensor) -> Tensor:
    """A patch convolution [width, 3, side, side] as a linear layer over [row, column, colour]."""
    return convolution.permute(0, 2, 3, 1).flatten(1)


def _take_pixels(state: dict[str, Tensor], made: Architecture) -> None:
    """Turn the patch embedding of normalised pixels into that of pixels in 0..255."""
    repeats = made.patch_size**2
    mean, std = torch.tensor(made.mean).repeat(repeats), torch.tensor(made.std).repeat(repeats)
    state["patch.bias"] = state["patch.bias"] - state["patch.weight"] @ (mean / std)
    state["patch.weight"] = state["patch.weight"] / (255 * std)


def _positions(tensors: dict[str, Tensor], made: Architecture) -> tuple[Tensor, Tensor]:
    """The tokens before the patches with their positions, and the positions of the patches."""
    tokens = [tensors.pop(name) for name in PREFIXES if name in tensors]
    prefix = torch.cat(tokens, 1) if tokens else torch.zeros(1, 0, made.width)
    places = tensors.pop("pos_embed")
    if places.shape[1] > made.patches:
        prefix, places = prefix + places[:, : made.prefix], places[:, made.prefix :]
    return prefix, places


def _head(tensors: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """The head over `Architecture.features`: that of a distilled DeiT is the mean of its two."""
    if "head.weight" not in tensors:
        return None, None
    weight, bias = tensors["head.weight"], tensors["head.bias"]
    if "head_dist.weight" in tensors:
        return torch.cat((weight, tensors["head_dist.weight"]), 1) / 2, (bias + tensors["head_dist.bias"]) / 2
    return weight, bias


def as_timm(model: UnifiedViT) -> dict[str, Tensor]:
    """timm's tensors of a model with one class token that takes pixels normalised by its mean and deviation."""
    made, state = model.made, model.state_dict()
    if made.prefix != 1:
        raise UnsupportedError(f"a model with {made.prefix} tokens before the patches cannot be written")
    patch = state["patch.weight"].view(made.width, made.patch_size, made.patch_size, 3)
    written = {
        "patch_embed.proj.weight": patch.permute(0, 3, 1, 2).contiguous(),
        "patch_embed.proj.bias": state["patch.bias"],
        "cls_token": state["prefix"],
        "pos_embed": torch.cat((torch.zeros(1, 1, made.width), state["position"]), 1),
    }
    return written | {theirs: state[ours] for ours, theirs in _pairs(made) if ours in state}
