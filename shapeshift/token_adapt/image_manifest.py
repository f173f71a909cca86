"""The manifest of a folder of image engines: one sub-folder a gamma, each verified and profiled."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.engines import manifest
from shapeshift.engines.manifest import FILE_NAME, FileEntry

FORMAT = 2
# Batch sizes that engines are profiled at.
BATCHES = (1, 4, 16, 64)


@dataclass(frozen=True)
class BatchLatency:
    """One measured point: a batch of `images`, milliseconds."""

    images: int
    median_ms: float
    p99_ms: float
    best_ms: float


@dataclass(frozen=True)
class GammaEntry:
    """The engine of one gamma, in the sub-folder `folder`; `tokens` are those after the last block.

    `precision` is f32 in a manifest of bf16 where the engine was off the reference in bf16. `memory_mb` is what one
    image of a batch needs (`schedule.activation_mb`).
    """

    gamma: int
    folder: str
    precision: str
    tokens: int
    memory_mb: float
    max_error: float
    min_cosine: float
    latency: tuple[BatchLatency, ...]


@dataclass(frozen=True)
class ImageManifest:
    """Everything that a process needs to know before it opens the engines of an image model."""

    model: str
    checkpoint_sha256: str
    build_key: str
    provider: str
    provider_version: str
    precision: str
    threads: int
    image_size: int
    width: int
    depth: int
    heads: int
    epsilon: float
    features: int
    reference: str
    tolerance: str
    hardware: str
    files: dict[str, FileEntry]
    engines: tuple[GammaEntry, ...]
    format: int = FORMAT

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder`."""
        (folder / FILE_NAME).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def load(folder: Path, expect_sha256: str | None = None) -> ImageManifest:
    """Read the manifest of `folder`; see `shapeshift.engines.manifest.read`."""
    return manifest.read(folder, _from_json, expect_sha256)


def profile(made: ImageManifest) -> dict[str, object]:
    """The measured latencies as the generated config.pbtxt carries them; points are [images, median, p99, least]."""
    return {
        "hardware": made.hardware,
        "provider": f"{made.provider} {made.provider_version}",
        "precision": made.precision,
        "threads": made.threads,
        "gammas": [
            {
                "gamma": entry.gamma,
                "precision": entry.precision,
                "tokens": entry.tokens,
                "memory_mb": entry.memory_mb,
                "latency": [[point.images, point.median_ms, point.p99_ms, point.best_ms] for point in entry.latency],
            }
            for entry in made.engines
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
    return ImageManifest(**{**data, "engines": engines, "files": files})
