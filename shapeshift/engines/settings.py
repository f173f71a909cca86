"""What a config.pbtxt says about the engines of a text model."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.engines import registry
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

PRECISIONS = ("auto", "f32", "bf16")
POOLINGS = ("mean", "cls")


@dataclass(frozen=True)
class TextEngineSettings:
    """Parameters that `make engines` reads. `auto` is resolved at build time and stated in the result.

    checkpoint        folder (absolute, under build/checkpoints or checkpoints/) or hub id
    provider          auto, openvino, onnxruntime, tensorrt or emulated
    precision         auto (bf16 where the hardware has it, else f32), f32 or bf16
    pooling           mean or cls; `normalize` scales each vector to length 1
    layers            how many of the checkpoint's first layers are computed; 0: all
    head              safetensors file of a linear head, weight [labels, hidden] and bias [labels], whose LOGITS are
                      those of the pooled vector; found as a checkpoint is; empty: the checkpoint's own
    max_tokens        longest text, special tokens counted
    bins              histogram: edges from the length histogram; staircase: from the measured latency
                      steps; none: the dynamic engine alone; or the edges themselves, "16,32,64"
    max_bins          most static engines (histogram)
    length_histogram  JSON file in the model's folder, [requests of 1, 2, ... tokens]; empty: every
                      octave of lengths equally likely
    dynamic           whether an engine that takes any shape is built beside the static ones
    packing           whether several short texts may share one call of an engine
    profile_file      emulated only: JSON {"lengths": [...], "latency_ms": [...]}
    time_scale        emulated only: factor on those latencies
    """

    checkpoint: str
    provider: str = "auto"
    precision: str = "auto"
    pooling: str = "mean"
    normalize: bool = True
    layers: int = 0
    head: str = ""
    max_tokens: int = 512
    bins: str = "histogram"
    max_bins: int = 12
    length_histogram: str = ""
    dynamic: bool = True
    packing: bool = True
    profile_file: str = ""
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        providers = ("auto", *registry.NAMES)
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a folder or a hub id")
        require(self.provider in providers, "provider", self.provider, f"one of {', '.join(providers)}")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        require(self.pooling in POOLINGS, "pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
        require(self.layers >= 0, "layers", self.layers, "0 or more")
        require(1 <= self.max_tokens <= 8192, "max_tokens", self.max_tokens, "1 to 8192")
        require(1 <= self.max_bins <= 64, "max_bins", self.max_bins, "1 to 64")
        require(self.time_scale > 0, "time_scale", self.time_scale, "above 0")
        edges = self.explicit_edges()
        require(self.dynamic or self.bins != "none", "bins", self.bins, "not none when dynamic is false")
        require(
            self.dynamic or edges is None or edges[-1] == self.max_tokens,
            "bins",
            self.bins,
            f"the last edge must be max_tokens ({self.max_tokens}) when dynamic is false",
        )

    def explicit_edges(self) -> list[int] | None:
        """The edges that `bins` spells out, or None where they are to be computed."""
        if self.bins in ("histogram", "staircase"):
            return None
        if self.bins == "none":
            return []
        try:
            edges = [int(part) for part in self.bins.split(",")]
        except ValueError:
            edges = []
        if not edges or edges != sorted(set(edges)) or edges[0] < 1 or edges[-1] > self.max_tokens:
            raise InvalidInputError(
                "bins",
                self.bins,
                f"histogram, staircase, none, or ascending lengths from 1 to {self.max_tokens}",
            )
        return edges


@dataclass(frozen=True)
class GeneratedSettings:
    """Parameters that `make engines` adds to the generated config.pbtxt.

    engines          folder of engines, relative to the model's folder
    manifest_sha256, checkpoint_sha256  what the folder must hold
    profile          measured latencies, JSON
    """

    engines: str = ""
    manifest_sha256: str = ""
    checkpoint_sha256: str = ""
    profile: str = ""
