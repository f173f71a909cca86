"""What a config.pbtxt says about the engines of an image model."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.engines import registry
from shapeshift.engines.settings import PRECISIONS
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

_MOST_GAMMA = 256


@dataclass(frozen=True)
class ImageEngineSettings:
    """Parameters that `make engines` reads. `auto` is resolved at build time and stated in the result.

    checkpoint  folder (absolute, under build/checkpoints or checkpoints/) or hub id of a timm ViT or DeiT
    provider    auto, openvino, onnxruntime or tensorrt
    precision   auto (bf16 where the hardware has it, else f32), f32 or bf16
    gammas      tokens added to (> 0) or merged in (< 0) each layer, one engine for each; 0 must be among them
    """

    checkpoint: str
    provider: str = "auto"
    precision: str = "auto"
    gammas: str = "-20,-15,-10,-5,0,2,4,8"

    def __post_init__(self) -> None:
        providers = ("auto", *(name for name in registry.NAMES if name != "emulated"))
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a folder or a hub id")
        require(self.provider in providers, "provider", self.provider, f"one of {', '.join(providers)}")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        self.gamma_list()

    def gamma_list(self) -> tuple[int, ...]:
        """The gammas in rising order; InvalidInputError for text that names none, or not 0."""
        try:
            gammas = sorted({int(part) for part in self.gammas.split(",")})
        except ValueError:
            gammas = []
        if 0 not in gammas or gammas[0] < -_MOST_GAMMA or gammas[-1] > _MOST_GAMMA:
            allowed = f"whole numbers of -{_MOST_GAMMA} to {_MOST_GAMMA} separated by commas, 0 among them"
            raise InvalidInputError("gammas", self.gammas, allowed)
        return tuple(gammas)
