"""Sizes and variants of a vision transformer."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.errors import InvalidInputError, UnsupportedError

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu")


@dataclass(frozen=True)
class Architecture:
    """A vision transformer of timm or transformers.

    prefix           tokens before the patches: class, distillation, registers
    pooled           the features hold the first `pooled` tokens,
    pooled_patches   then the mean of the patches,
    attention_pool   then what one more attention reads from all tokens (SigLIP); its MLP is as wide as the blocks'
    layer_scale      each residual branch has a scale (LayerScale)
    norm_pre, norm_final, norm_pooled  layer norms before the blocks, after them, and after pooling
    activation       of the MLPs, one of ACTIVATIONS
    gated            the MLPs of the blocks are SwiGLU: their activation is SiLU, and multiplies a second projection
    projection       length of the features after a linear projection of the pooled ones (CLIP); 0: none
    projection_bias  the projection has a bias
    rope             base of the frequencies by which places of patches rotate queries and keys (DINOv3); 0: positions
                     are added to the patches
    mean, std        of RGB pixels in 0..1
    """

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    prefix: int = 1
    pooled: int = 1
    pooled_patches: bool = False
    attention_pool: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    norm_pre: bool = False
    norm_final: bool = True
    norm_pooled: bool = False
    layer_scale: bool = False
    activation: str = "gelu"
    gated: bool = False
    projection: int = 0
    projection_bias: bool = False
    rope: float = 0.0
    epsilon: float = 1e-6
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width % self.heads:
            raise InvalidInputError("num_heads", self.heads, f"a divisor of the width, {self.width}")
        if self.image_size % self.patch_size:
            raise UnsupportedError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}; "
                "set both in config.json to those that the model was trained with"
            )
        if not 0 <= self.pooled <= self.prefix:
            raise InvalidInputError("pooled", self.pooled, f"0 to {self.prefix}")
        if not self.pooled_width:
            raise UnsupportedError("checkpoint: nothing pools the tokens; without an attention pool it has no features")
        if self.rope and self.head_width % 4:
            raise UnsupportedError(f"heads of width {self.head_width} with rotated positions; a multiple of 4")
        if self.activation not in ACTIVATIONS:
            raise UnsupportedError(f"activation {self.activation!r}; supported: {', '.join(ACTIVATIONS)}")

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """What the first layer of an MLP computes: with a gate, twice what the second reads."""
        return self.mlp_width * (1 + self.gated)

    @property
    def pooled_width(self) -> int:
        """Length of the pooled features, before a projection."""
        return self.width * (self.pooled + self.pooled_patches + self.attention_pool)

    @property
    def features(self) -> int:
        """Length of the feature vector of one image."""
        return self.projection or self.pooled_width
