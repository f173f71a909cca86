"""Reads the tensors of checkpoints into a `UnifiedViT`, and writes those of timm.

Our model takes pixels in 0..255: the library's normalisation (scale, mean, deviation) is folded into the patch
embedding, and its convolution becomes a linear layer over the values of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional

from shapeshift.engines import weight_headers
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.checkpoints.description import Description
from shapeshift.token_adapt.checkpoints.reading import open_vision
from shapeshift.token_adapt.checkpoints.tensor_names import TIMM
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT

_SCALE, _BIAS = "logit_scale", "logit_bias"

Tensor = torch.Tensor
Read = Callable[[str], Tensor]


def read_model(folder: Path) -> tuple[UnifiedViT, Tensor | None, Tensor | None]:
    """The model in `folder` in f32, and the weight and bias of its own classifier over the features, if any.

    Raises the errors of `reading.open_vision`, and InvalidInputError for missing tensors and wrong shapes.
    """
    _, described = open_vision(folder)
    return read_described(folder, described)


def read_described(folder: Path, described: Description) -> tuple[UnifiedViT, Tensor | None, Tensor | None]:
    """As `read_model`, of a checkpoint that is described already. Reads only the tensors of the image model."""
    headers = weight_headers.read(folder)

    def read(name: str) -> Tensor:
        if name not in headers:
            raise InvalidInputError(f"checkpoint: {name}", None, "this tensor is missing")
        value: Tensor = opened[headers[name].file].get_tensor(name)
        return value.float()

    model = UnifiedViT(described.architecture)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in {one.file for one in headers.values()}}
        _fill(model, described, read, set(headers))
        weight, bias = _classifier(described, read)
    return model.eval().requires_grad_(False), weight, bias


def read_similarity(folder: Path) -> tuple[float, float | None] | None:
    """The scale and the bias, None without one, of the logits that CLIP and SigLIP make of the cosines of images and
    texts; None for a checkpoint of one tower.
    """
    headers = weight_headers.read(folder)
    if _SCALE not in headers:
        return None
    numbers = []
    for name in (_SCALE, _BIAS):
        if name in headers:
            with safe_open(headers[name].file, "pt") as opened:
                numbers.append(float(opened.get_tensor(name).float().flatten()[0]))
    scale, *bias = numbers
    return math.exp(scale), bias[0] if bias else None


def _fill(model: UnifiedViT, described: Description, read: Read, present: set[str]) -> None:
    """Load what `model` needs; nothing may be missing."""
    architecture, names, root = described.architecture, described.names, described.root
    has_bias = f"{root}{names.patch}.bias" in present
    state = {
        "patch.weight": _linear(read(f"{root}{names.patch}.weight")),
        "patch.bias": read(f"{root}{names.patch}.bias") if has_bias else torch.zeros(architecture.width),
    }
    _fold_normalisation(state, architecture)
    tokens = [read(root + name) for name in names.tokens if root + name in present]
    positions = read(root + names.position) if names.position else None
    state["prefix"], state["position"] = _positions(described, tokens, positions)
    expected = model.state_dict()
    for ours, theirs in names.pairs(architecture.depth):
        if ours in expected:
            rows = len(expected[ours]) // len(theirs)
            zeros = {name for name in theirs if root + name not in present and names.is_zero(name)}
            state[ours] = torch.cat([torch.zeros(rows) if name in zeros else read(root + name) for name in theirs])
    if described.projection:
        state["projection.weight"] = read(f"{described.projection}.weight")
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise InvalidInputError(
                "checkpoint", f"{name} {tuple(value.shape)}", f"shape {tuple(expected[name].shape)}"
            )
    model.load_state_dict(state)


def _linear(convolution: Tensor) -> Tensor:
    """A patch convolution [width, 3, side, side] as a linear layer over [row, column, colour]."""
    return convolution.permute(0, 2, 3, 1).flatten(1)


def _fold_normalisation(state: dict[str, Tensor], architecture: Architecture) -> None:
    """Make the patch embedding of normalised pixels one of pixels in 0..255."""
    repeats = architecture.patch_size**2
    mean, std = (torch.tensor(values).repeat(repeats) for values in (architecture.mean, architecture.std))
    state["patch.bias"] = state["patch.bias"] - state["patch.weight"] @ (mean / std)
    state["patch.weight"] = state["patch.weight"] / (255 * std)


def _positions(described: Description, tokens: list[Tensor], positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """The prefix tokens with their positions added, and the positions of the patches; zeros where none are added.

    The first tokens have positions, as many as there are; registers may have none.
    """
    architecture = described.architecture
    parts = [token.view(1, -1, architecture.width) for token in tokens]
    prefix = torch.cat(parts, 1) if parts else torch.zeros(1, 0, architecture.width)
    if positions is None:
        return prefix, torch.zeros(1, architecture.patches, architecture.width)
    positions = positions.view(1, -1, architecture.width)
    side = described.trained_size // architecture.patch_size
    covered = positions.shape[1] - side**2
    prefix = torch.cat((prefix[:, :covered] + positions[:, :covered], prefix[:, covered:]), 1)
    patches = positions[:, covered:]
    if architecture.patches != side**2:
        new_side = architecture.image_size // architecture.patch_size
        grid = patches.view(1, side, side, -1).permute(0, 3, 1, 2)
        grid = functional.interpolate(
            grid, size=(new_side, new_side), mode="bicubic", align_corners=False, antialias=described.antialias
        )
        patches = grid.permute(0, 2, 3, 1).reshape(1, new_side**2, -1)
    return prefix, patches


def _classifier(described: Description, read: Read) -> tuple[Tensor | None, Tensor | None]:
    """The classifier over `Architecture.features`: the mean of its heads, each over its own part of them."""
    if described.classifier is None:
        return None, None
    heads = described.classifier.heads
    weights, biases = ([read(f"{head}.{kind}") for head in heads] for kind in ("weight", "bias"))
    weight, bias = torch.cat(weights, 1) / len(heads), sum(biases, torch.zeros(())) / len(heads)
    shape = (len(described.classifier.labels), described.architecture.features)
    if weight.shape != shape:
        raise InvalidInputError(f"checkpoint: {heads[0]}.weight", tuple(weight.shape), f"shape {shape}")
    return weight, bias


def as_timm(model: UnifiedViT) -> dict[str, Tensor]:
    """timm's tensors of a model with one class token; its patch embedding must be for normalised pixels."""
    architecture, state = model.architecture, model.state_dict()
    if architecture.prefix != 1 or architecture.attention_pool:
        raise UnsupportedError(
            f"a model with {architecture.prefix} tokens before the patches, or with attention pooling; only one "
            "class token can be written"
        )
    size = architecture.patch_size
    patch = state["patch.weight"].view(architecture.width, size, size, 3)
    written = {
        "patch_embed.proj.weight": patch.permute(0, 3, 1, 2).contiguous(),
        "patch_embed.proj.bias": state["patch.bias"],
        "cls_token": state["prefix"],
        "pos_embed": torch.cat((torch.zeros(1, 1, architecture.width), state["position"]), 1),
    }
    pairs = TIMM.pairs(architecture.depth)
    return written | {theirs[0]: state[ours] for ours, theirs in pairs if ours in state}
