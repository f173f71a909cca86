"""The demo's backbone and its head, as `train.py` trains them, with their initial weights."""

from __future__ import annotations

import math

import torch
from images import CLASSES, SIZE
from torch import nn
from torch.nn import functional

from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.schedule import expand
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
MADE = Architecture(image_size=SIZE, patch_size=4, width=144, depth=6, heads=3, mlp_width=576, mean=MEAN, std=STD)


class Classifier(nn.Module):
    """The transformer and its head over normalised images."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = UnifiedViT(MADE)
        self.head = nn.Linear(MADE.features, len(CLASSES))
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                nn.init.zeros_(part.bias)
        nn.init.trunc_normal_(self.vit.patch.weight, std=0.1)
        nn.init.trunc_normal_(self.vit.prefix, std=0.02)
        self.vit.position.data.copy_(waves(SIZE // MADE.patch_size, MADE.width))
        for block in self.vit.blocks:
            mimic(block.attention)

    def forward(self, images: torch.Tensor, side: int = SIZE) -> torch.Tensor:
        """Logits of images float [n, 32, 32, 3], resized to `side`; positions are interpolated to as many patches."""
        if side == SIZE:
            embedded = self.vit.embed(images)
        else:
            count, size = side // MADE.patch_size, MADE.patch_size
            small = resized(images, side).view(-1, count, size, count, size, 3).permute(0, 1, 3, 2, 4, 5)
            places = resized(self.vit.position.view(1, SIZE // size, SIZE // size, MADE.width), count)
            embedded = self.vit.patch(small.reshape(len(images), count**2, 3 * size**2)) + places.flatten(1, 2)
        return self.head(self.vit.encode(embedded, expand(0, embedded.shape[1], MADE.depth)))


def resized(grid: torch.Tensor, side: int) -> torch.Tensor:
    """[n, rows, columns, channels] resized to `side` rows and columns."""
    moved = functional.interpolate(grid.permute(0, 3, 1, 2), size=(side, side), mode="bilinear", antialias=True)
    return moved.permute(0, 2, 3, 1).contiguous()


def waves(side: int, width: int) -> torch.Tensor:
    """Sines and cosines of both coordinates as initial positions, [1, side * side, width]."""
    rates = 1 / 10000 ** (torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * rates
    axis = torch.cat((angles.sin(), angles.cos()), 1)
    rows, columns = axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)
    return torch.cat((rows, columns), 2).reshape(1, side * side, width)


def mimic(attention: nn.Module) -> None:
    """Mimetic initialisation (Trockman and Kolter, 2023): weights that resemble those of trained models.

    The product of query and key weights is near the identity, that of value and output weights near its negative.
    """
    width, dim = MADE.width, MADE.head_width
    for head in range(MADE.heads):
        place = slice(head * dim, (head + 1) * dim)
        wanted = 0.7 * torch.randn(width, width) / math.sqrt(dim) + 0.7 * torch.eye(width)
        left, size, right = torch.linalg.svd(wanted)
        root = size[:dim].sqrt()
        attention.qkv.weight.data[:width][place] = (left[:, :dim] * root).T
        attention.qkv.weight.data[width : 2 * width][place] = right[:dim] * root[:, None]
    left, size, right = torch.linalg.svd(0.4 * torch.randn(width, width) / math.sqrt(width) - 0.4 * torch.eye(width))
    root = size.sqrt()
    attention.proj.weight.data.copy_(left * root)
    attention.qkv.weight.data[2 * width :].copy_(right * root[:, None])
