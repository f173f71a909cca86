"""The unified model at one gamma: the module that engines are exported from and verified against.

    PIXELS    UINT8 [images, size, size, 3]                              RGB
    TASKS     INT64 [images]                                             row of PROMPTS; gamma > 0 only
    PROMPTS   FP32  [depth, tasks, 2, heads, gamma, width / heads]       of `PromptFolding`; gamma > 0 only
    FEATURES  FP32  [images, features]                                   input of the task heads

Token counts are static; the numbers of images and tasks are dynamic, so one engine serves all tasks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from shapeshift.engines.casts import to_f32
from shapeshift.engines.interfaces import Array
from shapeshift.token_adapt.model.schedule import expand
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT

_IMAGES = {0: "images"}


class GammaModule(nn.Module):
    """`input_axes`, `output_names`, `f32_modules` and `captured` are for `engines.interfaces.Provider.export`."""

    output_names = ("FEATURES",)
    f32_modules = ("matching", "rotation")
    # A batch in between is computed as the next larger one.
    captured: Mapping[str, tuple[int, ...]] = {"images": (1, 2, 4, 8, 16, 24, 32, 48, 64), "tasks": (8, 16, 32, 64)}

    def __init__(self, model: UnifiedViT, gamma: int) -> None:
        super().__init__()
        self.model = model
        self.gamma = gamma
        self.layers = expand(gamma, model.architecture.patches, model.architecture.depth)
        self.input_axes: dict[str, Mapping[int, str]] = {"PIXELS": _IMAGES}
        if gamma > 0:
            self.input_axes |= {"TASKS": _IMAGES, "PROMPTS": {1: "tasks"}}

    def cast(self, dtype: torch.dtype) -> GammaModule:
        """Compute in `dtype`, in place; matching stays in f32."""
        self.model.to(dtype)
        return self

    def forward(
        self, pixels: torch.Tensor, tasks: torch.Tensor | None = None, prompts: torch.Tensor | None = None
    ) -> torch.Tensor:
        selected = None
        if tasks is not None and prompts is not None:
            weights = self.model.patch.weight
            selected = [of_block.index_select(0, tasks).to(weights.dtype) for of_block in prompts.unbind(0)]
        features: torch.Tensor = self.model(pixels, self.layers, selected)
        return to_f32(features)

    def example(self, images: int, seed: int = 0, tasks: int = 2) -> dict[str, Array]:
        """Random inputs for that many images and tasks."""
        architecture, noise = self.model.architecture, np.random.default_rng(seed)
        size = architecture.image_size
        inputs: dict[str, Array] = {"PIXELS": noise.integers(0, 256, (images, size, size, 3), dtype=np.uint8)}
        if self.gamma > 0:
            shape = (architecture.depth, tasks, 2, architecture.heads, self.gamma, architecture.head_width)
            inputs["TASKS"] = noise.integers(0, tasks, images, dtype=np.int64)
            inputs["PROMPTS"] = noise.standard_normal(shape, dtype=np.float32)
        return inputs

    def features(self, inputs: Mapping[str, Array]) -> Array:
        """FEATURES of the eager model."""
        with torch.inference_mode():
            computed: Array = self(*(torch.from_numpy(inputs[name]) for name in self.input_axes)).numpy()
        return computed
