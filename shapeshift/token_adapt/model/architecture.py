"""Sizes and variants of a vision transformer."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.errors import InvalidInputError, UnsupportedError


@dataclass(frozen=True)
class Architecture:
    """A ViT or DeiT.

    prefix       tokens before the patches: class, distillation, registers
    pooled       the head reads the first `pooled` tokens; 0: the mean of the patches
    layer_scale  each residual branch has a scale (LayerScale)
    norm_pre, norm_final, norm_pooled  layer norms before the blocks, after them, and after pooling
    mean, std    of RGB pixels in 0..1
    """

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    prefix: int = 1
    pooled: int = 1
    qkv_bias: bool = True
    qk_norm: bool = False
    norm_pre: bool = False
    norm_final: bool = True
    norm_pooled: bool = False
    layer_scale: bool = False
    epsilon: float = 1e-6
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise InvalidInputError("num_heads", self.heads, f"a divisor of the width, {self.width}")
        if self.image_size % self.patch_size:
            raise UnsupportedError(f"img_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        if not 0 <= self.pooled <= self.prefix:
            raise InvalidInputError("pooled", self.pooled, f"0 to {self.prefix}")

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def features(self) -> int:
        """Length of the feature vector of one image."""
        return self.width * max(self.pooled, 1)
