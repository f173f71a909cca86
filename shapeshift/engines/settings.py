"""Parameters in config.pbtxt about the engines of a text model."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.engines import hardware
from shapeshift.engines.interfaces import MAX_TOKENS, PROVIDERS
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

# The names of sentence-transformers.
POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
NORMALIZE = ("auto", "true", "false")
PRECISIONS = (*hardware.PRECISIONS, "int8")


@dataclass(frozen=True)
class TextEngineSettings:
    """Parameters that `make engines` reads. It resolves `auto` and writes the result into the generated config.pbtxt.

    checkpoint        folder (absolute, under build/checkpoints or checkpoints/) or hub id
    provider          auto (on an NVIDIA GPU torch, or TensorRT where it is installed and faster; else openvino, or
                      native where it has kernels for the model and keeps up, unless `bins` lists lengths or the
                      placement is partitioned; native for int8), native, openvino, onnxruntime, torch, tensorrt or
                      emulated
    precision         auto (bf16 if the hardware computes it natively, else f16 on a GPU and f32 on a CPU), f32, bf16,
                      f16 on a GPU, or int8: weights and what they multiply as levels of 8 bits, which provider native
                      computes
    pooling           of POOLINGS, several with commas: their vectors are joined; auto: as the modules of the checkpoint
                      say, without modules lasttoken for a decoder, else mean
    normalize         whether each vector is scaled to length 1; auto: as the modules say, without modules true
    layers            the number of the checkpoint's first layers to compute; 0: all
    head              safetensors file of a linear head over the pooled vector, weight [labels, hidden] and bias
                      [labels], and of low-rank updates of the encoder's linear layers, LAYER.lora_A [rank, inputs]
                      and LAYER.lora_B [outputs, rank], if any; searched for like a checkpoint; empty: the
                      checkpoint's own head. With a head the modules of the checkpoint are not read: pooling and
                      normalize say what it was trained on
    pair_template     Jinja file in the model's folder, for a decoder that says yes or no to a pair: its chat template
                      gets messages of the roles query and document; empty: the checkpoint's own
    max_tokens        longest text, special tokens counted
    bins              lengths of the static engines. histogram: chosen by the length histogram; staircase: by the
                      steps of measured latency; none: only the dynamic engine; or the lengths, "16,32,64"
    max_bins          maximum number of static engines (histogram)
    length_histogram  JSON file in the model's folder, [requests of 1, 2, ... tokens]; empty: every octave of
                      lengths is equally likely
    dynamic           whether to build the dynamic engine, which takes any shape
    packing           whether several short texts may share one engine call
    profile_file      emulated only: JSON {"lengths": [...], "latency_ms": [...]}
    """

    checkpoint: str
    provider: str = "auto"
    precision: str = "auto"
    pooling: str = "auto"
    normalize: str = "auto"
    layers: int = 0
    head: str = ""
    pair_template: str = ""
    max_tokens: int = MAX_TOKENS
    bins: str = "histogram"
    max_bins: int = 12
    length_histogram: str = ""
    dynamic: bool = True
    packing: bool = True
    profile_file: str = ""

    def __post_init__(self) -> None:
        providers = ("auto", *PROVIDERS)
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a folder or a hub id")
        require(self.provider in providers, "provider", self.provider, f"one of {', '.join(providers)}")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        valid = self.pooling == "auto" or set(self.pooling.split(",")) <= set(POOLINGS)
        require(valid, "pooling", self.pooling, f"auto, or of {', '.join(POOLINGS)}")
        require(self.normalize in NORMALIZE, "normalize", self.normalize, f"one of {', '.join(NORMALIZE)}")
        require(self.layers >= 0, "layers", self.layers, "0 or more")
        require(1 <= self.max_tokens <= 8192, "max_tokens", self.max_tokens, "1 to 8192")
        require(1 <= self.max_bins <= 64, "max_bins", self.max_bins, "1 to 64")
        edges = self.explicit_edges()
        require(self.dynamic or self.bins != "none", "bins", self.bins, "not none when dynamic is false")
        require(
            self.dynamic or edges is None or edges[-1] == self.max_tokens,
            "bins",
            self.bins,
            f"the last edge must be max_tokens ({self.max_tokens}) when dynamic is false",
        )

    def explicit_edges(self) -> list[int] | None:
        """The lengths listed in `bins`; None if they are computed."""
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
