"""Parameters of a config.pbtxt for the engines of an image model."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.engines.providers import lookup
from shapeshift.engines.settings import PRECISIONS
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

_MAX_GAMMA = 256


@dataclass(frozen=True)
class ImageEngineSettings:
    """Parameters that `make engines` reads. It resolves `auto` and writes the result to the generated config.

    checkpoint  folder (absolute, under build/checkpoints or checkpoints/) or hub id of a vision transformer of timm or
                transformers
    provider    auto, openvino, onnxruntime or tensorrt
    precision   auto (bf16 if the hardware supports it, else f32), f32 or bf16
    gammas      tokens added to (> 0) or merged in (< 0) each layer, including 0; each gamma has its own engine
    """

    checkpoint: str
    provider: str = "auto"
    precision: str = "auto"
    gammas: str = "-20,-15,-10,-5,0,2,4,8"

    def __post_init__(self) -> None:
        providers = ("auto", *(name for name in lookup.PROVIDERS if name != "emulated"))
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a folder or a hub id")
        require(self.provider in providers, "provider", self.provider, f"one of {', '.join(providers)}")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        self.gamma_list()

    def gamma_list(self) -> tuple[int, ...]:
        """The gammas, ascending. Raises InvalidInputError for other text, or if 0 is missing."""
        try:
            gammas = sorted({int(part) for part in self.gammas.split(",")})
        except ValueError:
            gammas = []
        if 0 not in gammas or gammas[0] < -_MAX_GAMMA or gammas[-1] > _MAX_GAMMA:
            allowed = f"whole numbers from -{_MAX_GAMMA} to {_MAX_GAMMA} separated by commas, including 0"
            raise InvalidInputError("gammas", self.gammas, allowed)
        return tuple(gammas)
