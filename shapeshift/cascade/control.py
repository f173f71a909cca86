"""The decisions about one query between its levels: is it sure enough, what need the next level read, what is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.cascade import agreement, route, words
from shapeshift.cascade.ensemble import combine
from shapeshift.cascade.softmax import Array, softmax
from shapeshift.cascade.table import Candidate, Gap, Table
from shapeshift.cascade.words import Pruned


@dataclass(frozen=True)
class Level:
    """What a level says of one text: logits [labels]; the others where it has them."""

    logits: Array
    importance: Array | None = None
    offsets: Array | None = None
    embedding: Array | None = None


@dataclass(frozen=True)
class Answer:
    """What is said of a query so far: PROBABILITIES (of a regression the number), CONFIDENCE, the level's number."""

    probabilities: Array
    confidence: float
    level: int


class Control:
    """A candidate's decisions. Levels count from 1; stateless, so any thread may use it."""

    def __init__(self, table: Table, candidate: Candidate, gaps: Sequence[Gap] | None = None) -> None:
        self.candidate = candidate
        self._gaps = tuple(candidate.gaps if gaps is None else gaps)
        self._temperatures = [table.model(name).temperature for name in candidate.levels]
        self._regression = table.is_regression

    @property
    def levels(self) -> int:
        return len(self.candidate.levels)

    def gap(self, level: int) -> Gap:
        """What is decided behind `level`, which is not the last."""
        return self._gaps[level - 1]

    def first(self, level: int, found: Level) -> Answer:
        """The answer of one level alone: the first, or the one that a caller asked for."""
        if self._regression:
            return Answer(found.logits, self._agreement(level, found), level)
        probabilities = softmax(found.logits, self._temperatures[level - 1])
        return Answer(probabilities, float(probabilities.max()), level)

    def joined(self, before: Array, level: int, found: Level) -> tuple[Answer, Array]:
        """The answer with one more level's, and what the next one is joined with.

        before: softmax at temperature 1 of the first level, or what an earlier call gave (Eq. 6).
        """
        gap = self.gap(level - 1)
        if self._regression:
            number = combine(before, found.logits, gap.w)
            return Answer(number, self._agreement(level, found), level), number
        mixed = combine(before, softmax(found.logits), gap.w)
        # The logarithm of probabilities is as good as logits.
        calibrated = softmax(np.log(np.maximum(mixed, 1e-30)), gap.temperature)
        return Answer(mixed, float(calibrated.max()), level), mixed

    def to_join(self, found: Level) -> Array:
        """What the first level puts into the ensemble."""
        return found.logits if self._regression else softmax(found.logits)

    def p_next(self, level: int, found: Level) -> float:
        """The probability with which a query goes on behind `level` (Eqs. 3 and 4)."""
        if level >= self.levels:
            return 0.0
        if self._regression:
            sure = self._agreement(level, found)
        else:
            sure = route.confidence(found.logits, self._temperatures[level - 1])
        return route.p_large(sure, self.gap(level).rule)

    def left_of(self, texts: Sequence[bytes], level: int, found: Level) -> Pruned:
        """What of the texts the level behind `level` reads (Eq. 5); all, where this one has no importance."""
        alpha = self.gap(level).alpha
        if not alpha or found.importance is None or found.offsets is None:
            return Pruned(list(texts), 0)
        return words.left_of(texts, found.offsets, found.importance, alpha)

    def _agreement(self, level: int, found: Level) -> float:
        # The last level has nothing to be compared with.
        if level >= self.levels or found.embedding is None:
            return 1.0
        return agreement.confidence(found.embedding, self.gap(level).agreement)
