"""Holding an engine's vectors against the reference model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.engines.protocol import Array, Ids
from shapeshift.errors import EngineError

# The least cosine between an engine's vector and the reference's, for every text.
MIN_COSINE = {"f32": 0.99999, "bf16": 0.999}


class OffReferenceError(EngineError):
    """An engine whose vectors differ from the reference's by more than its precision allows."""


@dataclass(frozen=True)
class Deviation:
    """How far vectors lie from the reference: largest absolute difference, smallest cosine."""

    max_error: float
    min_cosine: float

    def within(self, precision: str) -> bool:
        """Whether the engine may be published in `precision`; NaN never may."""
        return bool(np.isfinite(self.max_error)) and self.min_cosine >= MIN_COSINE[precision]

    def require_within(self, precision: str, engine: str) -> None:
        """Raise OffReferenceError naming `engine` where it is not `within`."""
        if not self.within(precision):
            raise OffReferenceError(
                f"{engine} is off the reference: cosine {self.min_cosine:.6f}, at least {MIN_COSINE[precision]} wanted"
            )


def compare(vectors: Array, reference: Array) -> Deviation:
    """Deviation of `vectors` from `reference`, both [texts, width]."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    cosines = (a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30)
    return Deviation(float(np.abs(a - b).max()), float(cosines.min()))


def compare_sizes(vectors: Array, reference: Array) -> Deviation:
    """As `compare`, but what stands for the cosine, 2ab / (aa + bb), also tells vectors of other lengths apart."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    alike = 2 * (a * b).sum(1) / np.maximum((a * a).sum(1) + (b * b).sum(1), 1e-30)
    return Deviation(float(np.abs(a - b).max()), float(alike.min()))


def worst(found: Sequence[Deviation]) -> Deviation:
    """The largest error and the smallest cosine of all; NaN where any has one."""
    return Deviation(float(np.max([one.max_error for one in found])), float(np.min([one.min_cosine for one in found])))


class TestTexts:
    """Random id rows of wanted lengths with their reference outputs, each computed once.

    reference(ids) gives a vector for each output: EMBEDDING, and what else the model is asked for.
    """

    __test__ = False

    def __init__(
        self, reference: Callable[[Ids], Mapping[str, Array]], opening: int, closing: int, vocabulary: int
    ) -> None:
        self._reference = reference
        self._ends = (opening, closing)
        self._vocabulary = vocabulary
        self._made: dict[int, tuple[Ids, Mapping[str, Array]]] = {}

    def row(self, length: int) -> tuple[Ids, Mapping[str, Array]]:
        """A row of `length` ids and its reference vectors."""
        if length not in self._made:
            ids = np.random.default_rng(length).integers(0, self._vocabulary, length, dtype=np.int64)
            ids[0], ids[-1] = self._ends
            self._made[length] = (ids, self._reference(ids))
        return self._made[length]

    def deviation(
        self, run: Callable[[Sequence[Ids]], Mapping[str, Array]], packs: Sequence[Sequence[int]]
    ) -> Deviation:
        """Run each pack of row lengths through `run`, which gives [rows, ...], and compare every row's outputs."""
        pairs: dict[str, list[tuple[Array, Array]]] = {}
        for lengths in packs:
            rows = [self.row(length) for length in lengths]
            got = run([ids for ids, _ in rows])
            for index, (_, wanted) in enumerate(rows):
                for name, vector in wanted.items():
                    # An output with a value for each token is padded to the longest row of its pack.
                    pairs.setdefault(name, []).append((got[name][index][: len(vector)], vector))
        return worst([_of_output(name, found) for name, found in pairs.items()])


def _of_output(name: str, pairs: Sequence[tuple[Array, Array]]) -> Deviation:
    if name == "EMBEDDING":
        got, wanted = (np.stack(side) for side in zip(*pairs, strict=True))
        return compare(got, wanted)
    if all(vector.size == 1 for _, vector in pairs):
        # One number a row, as in regression, has no direction: those of all rows make one vector.
        got, wanted = (np.stack(side).T for side in zip(*pairs, strict=True))
        return compare_sizes(got, wanted)
    return worst([compare_sizes(got[None], wanted[None]) for got, wanted in pairs])
