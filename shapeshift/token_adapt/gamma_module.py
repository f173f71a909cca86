"""The unified model at one gamma, as the module that engines are exported from and verified against.

    PIXELS    UINT8 [images, size, size, 3]                              RGB
    TASKS     INT64 [images]                                             rows of PROMPTS; gamma > 0 only
    PROMPTS   FP32  [depth, tasks, 2, heads, gamma, width / heads]       as `folding` makes them; gamma > 0 only
    FEATURES  FP32  [images, features]                                   what the heads of tasks read

Token counts are static, the number of images and of tasks is not: one engine serves all tasks of its gamma.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from shapeshift.engines.protocol import Array
from shapeshift.token_adapt.schedule import expand
from shapeshift.token_adapt.unified import UnifiedViT

_IMAGES = {0: "images"}


class GammaModule(nn.Module):
    """See above; `input_axes` and `output_names` are what `engines.protocol.Provider.export` asks of a module."""

    output_names = ("FEATURES",)

    def __init__(self, model: UnifiedViT, gamma: int) -> None:
        super().__init__()
        made = model.made
        self.model = model
        self.gamma = gamma
        self.layers = expand(gamma, made.patches, made.depth)
        self.input_axes: dict[str, Mapping[int, str]] = {"PIXELS": _IMAGES}
        if gamma > 0:
            self.input_axes |= {"TASKS": _IMAGES, "PROMPTS": {1: "tasks"}}

    def forward(
        self, pixels: torch.Tensor, tasks: torch.Tensor | None = None, prompts: torch.Tensor | None = None
    ) -> torch.Tensor:
        own = None
        if tasks is not None and prompts is not None:
            own = [table.index_select(0, tasks) for table in prompts.unbind(0)]
        features: torch.Tensor = self.model(pixels, self.layers, own)
        return features

    def example(self, images: int, seed: int = 0, tasks: int = 2) -> dict[str, Array]:
        """Inputs of noise for that many images and tasks."""
        made, noise = self.model.made, np.random.default_rng(seed)
        size = made.image_size
        inputs: dict[str, Array] = {"PIXELS": noise.integers(0, 256, (images, size, size, 3), dtype=np.uint8)}
        if self.gamma > 0:
            shape = (made.depth, tasks, 2, made.heads, self.gamma, made.head_width)
            inputs["TASKS"] = noise.integers(0, tasks, images, dtype=np.int64)
            inputs["PROMPTS"] = noise.standard_normal(shape, dtype=np.float32)
        return inputs

    def features(self, inputs: Mapping[str, Array]) -> Array:
        """The eager model's FEATURES."""
        with torch.inference_mode():
            computed: Array = self(*(torch.from_numpy(inputs[name]) for name in self.input_axes)).numpy()
        return computed
