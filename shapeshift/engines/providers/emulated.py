"""Emulated engines: each call sleeps for a measured latency and returns a deterministic vector.

They run the real server, router and sidecar with more workers than the machine has cores. Label every measurement made
with them "emulated".
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.engines.hardware import resident_mb
from shapeshift.engines.interfaces import MAX_TOKENS, TOKEN_OUTPUTS, Array, Runtime
from shapeshift.errors import InvalidInputError, UnsupportedError

FILE_NAME = "emulated.json"
VERSION = "2"


class EmulatedEngine:
    """Sleeps for `latency(tokens)` and returns unit vectors that depend only on the ids."""

    def __init__(self, spec: Mapping[str, Any], tokens: int | None, rows: int | None) -> None:
        self.tokens = tokens
        self.rows = rows
        self._lengths = np.asarray(spec["lengths"], dtype=float)
        self._latency_s = np.asarray(spec["latency_ms"], dtype=float) / 1e3
        self._outputs = {name: int(width) for name, width in spec["outputs"].items()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        ids, segments = inputs["INPUT_IDS"], inputs["SEGMENTS"]
        time.sleep(float(np.interp(ids.shape[1], self._lengths, self._latency_s)))
        results = {}
        for name, width in self._outputs.items():
            if name in TOKEN_OUTPUTS:
                values = (ids % 97 + 1).astype(np.float32)
                results[name] = values if width < 0 else np.repeat(values[..., None], width, axis=2)
            else:
                results[name] = np.stack([_vector(ids[segments == row], width) for row in inputs["ROWS"]])
        return results


class EmulatedRuntime:
    """The engines of one description file."""

    def __init__(self, folder: Path) -> None:
        self._spec = json.loads((folder / FILE_NAME).read_text())

    def engine(self, tokens: int | None, rows: int | None) -> EmulatedEngine:
        return EmulatedEngine(self._spec, tokens, rows)

    def used_mb(self) -> float:
        return resident_mb()


class EmulatedProvider:
    """See `interfaces.Provider`. `describe` replaces `export`: there is no graph."""

    name = "emulated"

    def version(self) -> str:
        return VERSION

    def describe(
        self,
        folder: Path,
        lengths: Sequence[int],
        latency_ms: Sequence[float],
        outputs: Mapping[str, int],
    ) -> None:
        """Write what the engines in `folder` emulate: latencies by total tokens, and the width of each output."""
        if not lengths or len(lengths) != len(latency_ms):
            raise InvalidInputError("latency_ms", list(latency_ms), "one latency for each length")
        spec = {"lengths": list(lengths), "latency_ms": list(latency_ms), "outputs": dict(outputs)}
        (folder / FILE_NAME).write_text(json.dumps(spec) + "\n")

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        raise UnsupportedError("provider emulated has no graph to export")

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        return FILE_NAME

    def open(
        self, folder: Path, precision: str, threads: int, device: int | None = None, beside: Runtime | None = None
    ) -> EmulatedRuntime:
        return EmulatedRuntime(folder)


PROVIDER = EmulatedProvider()


def _vector(ids: Array, width: int) -> Array:
    seed = zlib.crc32(np.ascontiguousarray(ids).tobytes())
    vector = np.random.default_rng(seed).standard_normal(width).astype(np.float32)
    return vector / np.linalg.norm(vector)
