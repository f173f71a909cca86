"""Engines whose files Triton's own backends serve, and their models as a front reaches them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shapeshift.engines.manifest import EngineEntry, FileEntry, Latency, Manifest, Output
from shapeshift.polymorph import engine_model
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse
from tests.fakes import PbUtils

VOCABULARY, MAX_TOKENS = 1000, 64
SHAPES = {16: (16, 4), 32: (32, 8), 64: (None, None)}
"""Tokens and rows of the engine of each bin."""


def version(edge: int) -> int:
    """The version of a worker that is the engine of this bin."""
    return engine_model.version_of(made(), edge)


def made(provider: str = "tensorrt", **outputs: tuple[int, ...]) -> Manifest:
    """Engines of two static lengths and any length, with one file each. outputs: dims; by default an EMBEDDING."""
    entries = []
    for edge, (tokens, rows) in SHAPES.items():
        latency = (Latency(edge, 1, edge / 16, edge / 16, edge / 16),)
        entries.append(EngineEntry(f"{tokens or 'dynamic'}.plan", tokens, rows, 0.0, 1.0, latency))
    return Manifest(
        model="front",
        checkpoint_sha256="",
        build_key="",
        provider=provider,
        provider_version="1",
        precision="f16",
        vocabulary=VOCABULARY,
        max_tokens=MAX_TOKENS,
        packs_rows=True,
        position_offset=2,
        reference="",
        tolerance="",
        hardware="",
        outputs=tuple(Output(name, "TYPE_FP32", dims) for name, dims in (outputs or {"EMBEDDING": (2,)}).items()),
        files={entry.file: FileEntry(1, "") for entry in entries},
        engines=tuple(entries),
    )


class EngineModel:
    """One version of a worker: sums up ids and positions of each segment, for requests of exactly its shape."""

    decoupled = False

    def __init__(self, pb_utils: PbUtils, edge: int) -> None:
        self._pb_utils = pb_utils
        self._shape = SHAPES[edge]
        self.requests = 0

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: InferenceRequest) -> InferenceResponse:
        self.requests += 1
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        assert list(arrays) == ["INPUT_IDS", "SEGMENTS", "POSITIONS", "ROWS"]
        assert all(values.dtype == np.int64 for values in arrays.values())
        tokens, rows = self._shape
        length = arrays["INPUT_IDS"].shape[1]
        assert tokens in (None, length) and rows in (None, len(arrays["ROWS"]))
        assert arrays["SEGMENTS"].shape == arrays["POSITIONS"].shape == (1, length)
        vectors = [
            [arrays[name][0][arrays["SEGMENTS"][0] == row].sum() for name in ("INPUT_IDS", "POSITIONS")]
            for row in arrays["ROWS"]
        ]
        tensor = self._pb_utils.Tensor("EMBEDDING", np.array(vectors, np.float32))
        return self._pb_utils.InferenceResponse([tensor])


def wanted(text: Sequence[int]) -> list[float]:
    """The vector of a text."""
    return [float(sum(text)), float(sum(range(2, 2 + len(text))))]
