"""Holding an engine's vectors against the reference model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.engines.protocol import Array, Ids

# The least cosine between an engine's vector and the reference's, for every text.
MIN_COSINE = {"f32": 0.99999, "bf16": 0.999}


@dataclass(frozen=True)
class Deviation:
    """How far vectors lie from the reference: largest absolute difference, smallest cosine."""

    max_error: float
    min_cosine: float

    def within(self, precision: str) -> bool:
        """Whether the engine may be published; NaN never may."""
        return bool(np.isfinite(self.max_error)) and self.min_cosine >= MIN_COSINE[precision]


def compare(vectors: Array, reference: Array) -> Deviation:
    """Deviation of `vectors` from `reference`, both [texts, width]."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    cosines = (a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30)
    return Deviation(float(np.abs(a - b).max()), float(cosines.min()))


class TestTexts:
    """Random id rows of wanted lengths with their reference vectors, each computed once."""

    __test__ = False

    def __init__(
        self, reference: Callable[[Sequence[Ids]], Array], opening: int, closing: int, vocabulary: int
    ) -> None:
        self._reference = reference
        self._ends = (opening, closing)
        self._vocabulary = vocabulary
        self._made: dict[int, tuple[Ids, Array]] = {}

    def row(self, length: int) -> tuple[Ids, Array]:
        """A row of `length` ids and its reference vector [width]."""
        if length not in self._made:
            ids = np.random.default_rng(length).integers(0, self._vocabulary, length, dtype=np.int64)
            ids[0], ids[-1] = self._ends
            self._made[length] = (ids, self._reference([ids])[0])
        return self._made[length]

    def deviation(self, run: Callable[[Sequence[Ids]], Array], packs: Sequence[Sequence[int]]) -> Deviation:
        """Run each pack of row lengths through `run` and compare every row with the reference."""
        got: list[Array] = []
        wanted: list[Array] = []
        for lengths in packs:
            rows = [self.row(length) for length in lengths]
            got.extend(run([ids for ids, _ in rows]))
            wanted.extend(vector for _, vector in rows)
        return compare(np.stack(got), np.stack(wanted))
