"""Comparing an engine's outputs with those of the reference model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.engines.interfaces import TOKEN_OUTPUTS, Array, Ids
from shapeshift.errors import EngineError

# The minimum cosine between the vectors of an engine and of the reference model, for every text.
MIN_COSINE = {"f32": 0.99999, "bf16": 0.999, "f16": 0.999, "int8": 0.99}


REFERENCE = "reference.json"
"""Beside the engines and in the model's folder: a few rows of ids, and what the reference model makes of them."""
# Lengths of the rows that are kept.
_KEPT = (7, 16)
LONGEST_KEPT = max(_KEPT)
_DIGITS = 6


class VerificationError(EngineError):
    """An engine's outputs differ from the reference model by more than its precision allows."""


@dataclass(frozen=True)
class Deviation:
    """The largest absolute difference from the reference, and the smallest cosine with it."""

    max_error: float
    min_cosine: float

    def within(self, precision: str) -> bool:
        """Whether the deviation is within the tolerance of `precision`; never for NaN."""
        return bool(np.isfinite(self.max_error)) and self.min_cosine >= MIN_COSINE[precision]

    def require_within(self, precision: str, engine: str) -> None:
        """Raise VerificationError naming `engine` unless `within(precision)`."""
        if not self.within(precision):
            limit = f"must be at least {MIN_COSINE[precision]}"
            raise VerificationError(f"{engine} differs from the reference: cosine {self.min_cosine:.6f}, {limit}")


def compare(vectors: Array, reference: Array) -> Deviation:
    """Deviation of `vectors` from `reference`, both [texts, width]."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    cosines = (a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30)
    return Deviation(float(np.abs(a - b).max()), float(cosines.min()))


def compare_with_magnitude(vectors: Array, reference: Array) -> Deviation:
    """As `compare`, with 2ab / (aa + bb) instead of the cosine, which also falls when magnitudes differ; 1 for two
    vectors of zeros."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    magnitudes = (a * a).sum(1) + (b * b).sum(1)
    similarities = np.where(magnitudes == 0, 1.0, 2 * (a * b).sum(1) / np.maximum(magnitudes, 1e-30))
    return Deviation(float(np.abs(a - b).max()), float(similarities.min()))


def worst(deviations: Sequence[Deviation]) -> Deviation:
    """The largest error and the smallest cosine; NaN if any is NaN."""
    errors = [deviation.max_error for deviation in deviations]
    return Deviation(float(np.max(errors)), float(np.min([deviation.min_cosine for deviation in deviations])))


class ReferenceTexts:
    """Random rows of ids of given lengths and their reference outputs, each computed once.

    reference(ids) returns a vector for each of the model's outputs; opening, closing: the first and last id of a row;
    padding: an id that rows do not contain; middle: the id in the middle of a row; None: any.
    """

    def __init__(
        self,
        reference: Callable[[Ids], Mapping[str, Array]],
        opening: int,
        closing: int,
        vocabulary: int,
        padding: int | None = None,
        middle: int | None = None,
    ) -> None:
        self._reference = reference
        self._middle = middle
        self._ends = (opening, closing)
        self._padding = padding
        self._vocabulary = vocabulary
        self._rows: dict[int, tuple[Ids, Mapping[str, Array]]] = {}

    def row(self, length: int) -> tuple[Ids, Mapping[str, Array]]:
        """A row of `length` ids and its reference outputs."""
        if length not in self._rows:
            ids = np.random.default_rng(length).integers(0, self._vocabulary, length, dtype=np.int64)
            if self._padding is not None:
                # Texts do not contain it, and models may take it for the end of one.
                ids[ids == self._padding] = (self._padding + 1) % self._vocabulary
            if self._middle is not None:
                ids[length // 2] = self._middle
            ids[0], ids[-1] = self._ends
            self._rows[length] = (ids, self._reference(ids))
        return self._rows[length]

    def kept(self, precision: str) -> str:
        """The file `REFERENCE`, for the sidecar: ids, outputs by name, and the smallest cosine of a good answer."""
        rows = [self.row(length) for length in _KEPT]
        names = [name for name in rows[0][1] if name not in (*TOKEN_OUTPUTS, "TERM_WEIGHTS")]
        outputs = {name: [np.round(row[name].astype(float), _DIGITS).tolist() for _, row in rows] for name in names}
        ids = [row.tolist() for row, _ in rows]
        return json.dumps({"ids": ids, "outputs": outputs, "min_cosine": MIN_COSINE[precision]})

    def deviation(
        self, run: Callable[[Sequence[Ids]], Mapping[str, Array]], packs: Sequence[Sequence[int]]
    ) -> Deviation:
        """Compare the outputs of every row with the reference. `run` computes a pack: outputs [rows, ...].

        packs: the row lengths of each pack.
        """
        pairs: dict[str, list[tuple[Array, Array]]] = {}
        for lengths in packs:
            rows = [self.row(length) for length in lengths]
            got = run([ids for ids, _ in rows])
            for index, (_, expected) in enumerate(rows):
                for name, vector in expected.items():
                    # An output with one entry per token is padded to the longest row of its pack.
                    pairs.setdefault(name, []).append((got[name][index][: len(vector)].ravel(), vector.ravel()))
        return worst([_output_deviation(name, values) for name, values in pairs.items()])


def _output_deviation(name: str, pairs: Sequence[tuple[Array, Array]]) -> Deviation:
    if name == "EMBEDDING":
        got, expected = (np.stack(side) for side in zip(*pairs, strict=True))
        return compare(got, expected)
    if name == "TOKEN_WEIGHTS" or all(vector.size == 1 for _, vector in pairs):
        # One number per row (regression) has no direction, and few tokens of a short text have a weight: compare the
        # numbers of all rows as one vector.
        got, expected = (np.concatenate(side)[None] for side in zip(*pairs, strict=True))
        return compare_with_magnitude(got, expected)
    return worst([compare_with_magnitude(got[None], expected[None]) for got, expected in pairs])
