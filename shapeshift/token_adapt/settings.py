"""What an image model states in its config.pbtxt: parameters of its engines and of serving, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shapeshift.engines.hardware import PRECISIONS
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.errors import InvalidInputError
from shapeshift.serving.model_args import DESCRIPTION, FrontSettings, Signature, Tensor
from shapeshift.settings import require
from shapeshift.token_adapt.policy.image_scheduler import SchedulerSettings

MAX_LATENCY_MS = 86_400_000.0
MAX_UTILITY = 1e9
EMULATED = "emulated"
_OF_TEXTS = "native"
POOLINGS = ("auto", "cls", "mean", "cls,mean")
_MAX_GAMMA = 256

_SIGNATURE = Signature(
    inputs=(
        Tensor("IMAGE", "TYPE_STRING", optional=True),
        Tensor("PIXELS", "TYPE_UINT8", (-1, -1, 3), optional=True),
    ),
    outputs=(
        Tensor("LABEL", "TYPE_STRING"),
        Tensor("PROBABILITIES", "TYPE_FP32", (-1,)),
        Tensor("EMBEDDING", "TYPE_FP32", (-1,)),
        Tensor("GAMMA", "TYPE_INT32"),
        Tensor("BATCH_SIZE", "TYPE_INT32"),
        Tensor("OUTCOME", "TYPE_STRING"),
        DESCRIPTION,
    ),
)


def signature(parameters: Mapping[str, str]) -> Signature:
    """Of every model of this technique."""
    return _SIGNATURE


@dataclass(frozen=True)
class ImageEngineSettings:
    """Parameters that `make engines` reads. It resolves `auto` and writes the result to the generated config.

    checkpoint  folder (absolute, under build/checkpoints or checkpoints/) or hub id of a vision transformer of timm or
                transformers
    provider    auto, openvino, onnxruntime or tensorrt
    precision   auto (bf16 if the hardware supports it, else f32), f32 or bf16
    gammas      tokens added to (> 0) or merged in (< 0) each layer, including 0; each gamma has its own engine
    pooling     what the features are: auto (as the library pools), cls (the class token), mean (of the patches), or
                cls,mean (both, one behind the other)
    images      folder of JPEG and PNG files on which `make engines` measures what merging does to vectors; empty: 16
                generated images
    """

    checkpoint: str
    provider: str = "auto"
    precision: str = "auto"
    gammas: str = "-20,-15,-10,-5,0,2,4,8"
    pooling: str = "auto"
    images: str = ""

    def __post_init__(self) -> None:
        providers = ("auto", *(name for name in PROVIDERS if name not in (EMULATED, _OF_TEXTS)))
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a folder or a hub id")
        require(self.provider in providers, "provider", self.provider, f"one of {', '.join(providers)}")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        require(self.pooling in POOLINGS, "pooling", self.pooling, f"one of {'; '.join(POOLINGS)}")
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


@dataclass(frozen=True)
class EmulatedSettings:
    """Parameters of a model with provider `emulated`: its profile."""

    provider: str = ""
    profile_file: str = ""


@dataclass(frozen=True)
class TokenAdaptSettings(SchedulerSettings, FrontSettings):
    """Parameters of the serving process, with those of its scheduler.

    tasks_dir          folder of the task registry; empty: build/tasks/<model>
    starter_dir        folder of task folders, a path or under checkpoints/, that `make engines` registers if there is
                       no registry yet, or none for this checkpoint
    task               default task; empty: with several tasks, a request must name one
    text_model         the front with the tower for texts of the same checkpoint (CLIP, SigLIP)
    latency_ms         default latency requirement; 0: that of the task
    use_gammas         gammas to choose from, separated by commas; empty: all gammas of the model
    batch_size         Algorithm 1's epsilon; 0: the smallest size with 90% of the best throughput, at most 64
    memory_mb          memory limit of a batch; 0: what is available when the model loads
    queue_mb           most MiB of waiting images, as received and as decoded together; further requests get UNAVAILABLE
    max_pixels         most pixels in an image
    decode_threads     threads that decode and resize
    threads            threads of the engines; 0: one per core
    slo_ms             latency objective; half of it and 95% of it become bounds of the latency histogram; 0: none
    """

    tasks_dir: str = ""
    starter_dir: str = ""
    task: str = ""
    text_model: str = ""
    latency_ms: float = 0.0
    use_gammas: str = ""
    batch_size: int = 0
    memory_mb: int = 0
    queue_mb: int = 1024
    max_pixels: int = 25_000_000
    decode_threads: int = 1
    threads: int = 0
    slo_ms: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        FrontSettings.__post_init__(self)
        valid = 0 <= self.latency_ms <= MAX_LATENCY_MS
        require(valid, "latency_ms", self.latency_ms, f"0 to {MAX_LATENCY_MS:g}")
        for name in ("memory_mb", "slo_ms"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(0 <= self.batch_size <= 4096, "batch_size", self.batch_size, "0 to 4096")
        require(self.queue_mb >= 1, "queue_mb", self.queue_mb, "at least 1")
        require(self.max_pixels >= 1, "max_pixels", self.max_pixels, "at least 1")
        require(1 <= self.decode_threads <= 64, "decode_threads", self.decode_threads, "1 to 64")
        require(0 <= self.threads <= 1024, "threads", self.threads, "0 to 1024")
        self.gammas(())

    def gammas(self, available: tuple[int, ...]) -> tuple[int, ...]:
        """The gammas to choose from: `use_gammas`, or all `available` ones. Raises InvalidInputError for other text."""
        if not self.use_gammas:
            return available
        try:
            return tuple(sorted({int(part) for part in self.use_gammas.split(",")}))
        except ValueError:
            allowed = "whole numbers separated by commas, such as -4,0,2"
            raise InvalidInputError("use_gammas", self.use_gammas, allowed) from None
