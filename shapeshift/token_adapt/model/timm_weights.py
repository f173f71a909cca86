"""Reads and writes the tensors of timm's ViT and DeiT checkpoints.

Our model takes pixels in 0..255: timm's normalisation (scale, mean, deviation) is folded into the patch embedding, and
its convolution becomes a linear layer over the values of a patch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.timm_config import PREFIXES, read_architecture
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

WEIGHTS_FILE = "model.safetensors"
# Modules of a block by our name and timm's; each has a weight and usually a bias.
_BLOCK_PARTS = {
    "norm1": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "attention.proj": "attn.proj",
    "norm2": "norm2",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_NORMS = ("norm_pre", "norm", "fc_norm")
_HEADS = ("head", "head_dist")


def read_model(folder: Path) -> tuple[UnifiedViT, Tensor | None, Tensor | None]:
    """The model in `folder` (config.json and model.safetensors) in f32, and the weight and bias of its head, if any.

    Raises InvalidInputError for missing tensors and wrong shapes, UnsupportedError for an unsupported architecture or
    unknown tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: value.float() for name, value in load_file(folder / WEIGHTS_FILE).items()}
    architecture = read_architecture(config, {name: tuple(value.shape) for name, value in tensors.items()})
    weight, bias = _head({name: tensors.pop(name) for name in list(tensors) if name.split(".")[0] in _HEADS})
    model = UnifiedViT(architecture)
    _fill(model, tensors)
    return model.eval().requires_grad_(False), weight, bias


def _fill(model: UnifiedViT, tensors: dict[str, Tensor]) -> None:
    """Load `tensors` into `model`; none may be missing or left over."""
    architecture = model.architecture
    state = {
        "patch.weight": _linear(tensors.pop("patch_embed.proj.weight")),
        "patch.bias": tensors.pop("patch_embed.proj.bias", torch.zeros(architecture.width)),
    }
    _fold_normalisation(state, architecture)
    state["prefix"], state["position"] = _positions(tensors, architecture)
    expected = model.state_dict()
    for ours, theirs in _name_pairs(architecture):
        if ours in expected:
            if theirs not in tensors:
                raise InvalidInputError(f"checkpoint: {theirs}", None, "this tensor is missing")
            state[ours] = tensors.pop(theirs)
    if tensors:
        raise UnsupportedError(f"checkpoint: unknown tensors, not part of timm's ViT and DeiT: {sorted(tensors)[:3]}")
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise InvalidInputError(
                "checkpoint", f"{name} {tuple(value.shape)}", f"shape {tuple(expected[name].shape)}"
            )
    model.load_state_dict(state)


def _name_pairs(architecture: Architecture) -> list[tuple[str, str]]:
    """Our name and timm's of each parameter, except the patch embedding, the prefix tokens and the positions."""
    pairs = [(f"{name}.{kind}", f"{name}.{kind}") for name in _NORMS for kind in ("weight", "bias")]
    for index in range(architecture.depth):
        parts = [(f"blocks.{index}.{ours}", f"blocks.{index}.{theirs}") for ours, theirs in _BLOCK_PARTS.items()]
        pairs += [(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in parts for kind in ("weight", "bias")]
        pairs += [(f"blocks.{index}.scale{branch}", f"blocks.{index}.ls{branch}.gamma") for branch in (1, 2)]
    return pairs


def _linear(convolution: Tensor) -> Tensor:
    """A patch convolution [width, 3, side, side] as a linear layer over [row, column, colour]."""
    return convolution.permute(0, 2, 3, 1).flatten(1)


def _fold_normalisation(state: dict[str, Tensor], architecture: Architecture) -> None:
    """Make the patch embedding of normalised pixels one of pixels in 0..255."""
    repeats = architecture.patch_size**2
    mean, std = (torch.tensor(values).repeat(repeats) for values in (architecture.mean, architecture.std))
    state["patch.bias"] = state["patch.bias"] - state["patch.weight"] @ (mean / std)
    state["patch.weight"] = state["patch.weight"] / (255 * std)


def _positions(tensors: dict[str, Tensor], architecture: Architecture) -> tuple[Tensor, Tensor]:
    """The prefix tokens with their positions added, and the positions of the patches."""
    tokens = [tensors.pop(name) for name in PREFIXES if name in tensors]
    prefix = torch.cat(tokens, 1) if tokens else torch.zeros(1, 0, architecture.width)
    positions = tensors.pop("pos_embed")
    if positions.shape[1] > architecture.patches:
        prefix, positions = prefix + positions[:, : architecture.prefix], positions[:, architecture.prefix :]
    return prefix, positions


def _head(tensors: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """The head over `Architecture.features`; for a distilled DeiT, the mean of its two heads."""
    if "head.weight" not in tensors:
        return None, None
    weight, bias = tensors["head.weight"], tensors["head.bias"]
    if "head_dist.weight" in tensors:
        return torch.cat((weight, tensors["head_dist.weight"]), 1) / 2, (bias + tensors["head_dist.bias"]) / 2
    return weight, bias


def as_timm(model: UnifiedViT) -> dict[str, Tensor]:
    """timm's tensors of a model with one class token; its patch embedding must be for normalised pixels."""
    architecture, state = model.architecture, model.state_dict()
    if architecture.prefix != 1:
        raise UnsupportedError(f"a model with {architecture.prefix} tokens before the patches; only 1 can be written")
    size = architecture.patch_size
    patch = state["patch.weight"].view(architecture.width, size, size, 3)
    written = {
        "patch_embed.proj.weight": patch.permute(0, 3, 1, 2).contiguous(),
        "patch_embed.proj.bias": state["patch.bias"],
        "cls_token": state["prefix"],
        "pos_embed": torch.cat((torch.zeros(1, 1, architecture.width), state["position"]), 1),
    }
    return written | {theirs: state[ours] for ours, theirs in _name_pairs(architecture) if ours in state}
