"""The manifest of a folder of image engines, which has one sub-folder per gamma."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.engines import manifest as engine_manifest
from shapeshift.engines.manifest import FILE_NAME, FileEntry

FORMAT = 5
# Profiled batch sizes.
BATCHES = (1, 4, 16, 64)


@dataclass(frozen=True)
class Preprocessing:
    """How an image of any size becomes the square input of a model: resized, then its centre cut out.

    size      edge of the square, pixels
    edge      which edge of the image gets `resized` pixels: shortest, longest, or both (which ignores its proportions)
    resized   pixels; 0: `size`
    filter    Pillow's name of the interpolation, in lower case
    rounding  of an odd margin around the centre: even (torchvision, timm) or down (transformers)
    border    RGB colour around an image that is smaller than the square
    on_white  transparent parts show white; False: the colours below them
    """

    size: int
    edge: str = "shortest"
    resized: int = 0
    filter: str = "bicubic"
    rounding: str = "even"
    border: tuple[int, int, int] = (0, 0, 0)
    on_white: bool = False


@dataclass(frozen=True)
class BatchLatency:
    """One measured point: a batch of `images`, milliseconds.

    The scheduler reads `best_ms`: what the batch takes when nothing else runs, as far as it can be told.
    """

    images: int
    median_ms: float
    p99_ms: float
    best_ms: float


@dataclass(frozen=True)
class GammaEntry:
    """The engine of one gamma, verified and profiled.

    precision  f32 in a bf16 manifest if the bf16 engine was outside the tolerance
    tokens     after the last block
    memory_mb  activations of one image (`schedule.activation_mb`)
    agreement  share of the labels of registered tasks that are those of the reference, where labels were compared in
               place of the cosine: for a gamma below 0 in bf16
    cosine     of the vectors to those of gamma 0, the mean over images; 0 above gamma 0, whose prompts are of tasks
    """

    gamma: int
    folder: str
    precision: str
    tokens: int
    memory_mb: float
    max_error: float
    min_cosine: float
    agreement: float | None
    cosine: float
    latency: tuple[BatchLatency, ...]


@dataclass(frozen=True)
class ImageManifest:
    """Describes the engines of an image model, for build and serving.

    family: of the checkpoint; labels: of its own classifier, empty without one.
    similarity: the scale and the bias (None: there is none) of the logits that it makes of the cosines of images and
    texts; None: it has no tower for texts. vectors: on which images the cosines were measured.
    """

    model: str
    family: str
    checkpoint_sha256: str
    build_key: str
    provider: str
    provider_version: str
    precision: str
    threads: int
    preprocessing: Preprocessing
    width: int
    depth: int
    heads: int
    epsilon: float
    features: int
    labels: tuple[str, ...]
    reference: str
    tolerance: str
    hardware: str
    files: dict[str, FileEntry]
    engines: tuple[GammaEntry, ...]
    # The repository and commit of a hub that the checkpoint comes from, owner/model@commit; empty: none.
    checkpoint_origin: str = ""
    # MiB of a GPU's memory that all engines took when they had run; 0: they run on a CPU.
    device_mb: float = 0.0
    similarity: tuple[float, float | None] | None = None
    vectors: str = ""
    format: int = FORMAT

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder`."""
        (folder / FILE_NAME).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def load(folder: Path, expect_sha256: str | None = None) -> ImageManifest:
    """Read the manifest of `folder`; see `shapeshift.engines.manifest.read`."""
    return engine_manifest.read(folder, _from_json, expect_sha256)


def profile(manifest: ImageManifest) -> dict[str, object]:
    """The measured latencies for the generated config.pbtxt; points are [images, median, p99, best] in ms."""
    return {
        "hardware": manifest.hardware,
        "provider": f"{manifest.provider} {manifest.provider_version}",
        "precision": manifest.precision,
        "threads": manifest.threads,
        "gammas": [
            {
                "gamma": entry.gamma,
                "precision": entry.precision,
                "tokens": entry.tokens,
                "memory_mb": entry.memory_mb,
                "cosine": entry.cosine,
                "latency": [[point.images, point.median_ms, point.p99_ms, point.best_ms] for point in entry.latency],
            }
            for entry in manifest.engines
        ],
    }


def _from_json(data: dict[str, Any]) -> ImageManifest:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}, this version reads {FORMAT}")
    engines = tuple(
        GammaEntry(**{**entry, "latency": tuple(BatchLatency(**point) for point in entry["latency"])})
        for entry in data["engines"]
    )
    files = {name: FileEntry(**entry) for name, entry in data["files"].items()}
    border = tuple(data["preprocessing"]["border"])
    preprocessing = Preprocessing(**{**data["preprocessing"], "border": border})
    parsed = {"engines": engines, "files": files, "preprocessing": preprocessing, "labels": tuple(data["labels"])}
    if data["similarity"] is not None:
        parsed["similarity"] = tuple(data["similarity"])
    return ImageManifest(**{**data, **parsed})
