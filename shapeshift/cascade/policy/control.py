"""The decisions about one text between two levels: its answer so far, whether it goes on, and what is read next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.cascade.candidates.table import Candidate, CandidateTable, Gap
from shapeshift.cascade.policy import pruning, routing
from shapeshift.cascade.policy.pruning import PrunedTexts
from shapeshift.cascade.policy.routing import Array, agreement, combine, softmax


@dataclass(frozen=True)
class LevelOutput:
    """What a level computed of one text. logits: [labels]; where the level has them, importance: [tokens], offsets:
    [tokens, 2] and embedding: [width]."""

    logits: Array
    importance: Array | None = None
    offsets: Array | None = None
    embedding: Array | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to a text so far: PROBABILITIES (of a regression the number), CONFIDENCE and LEVEL."""

    probabilities: Array
    confidence: float
    level: int


class Control:
    """The decisions of one candidate. Levels count from 1. Stateless: any thread may use it."""

    def __init__(self, table: CandidateTable, candidate: Candidate) -> None:
        self.table = table
        self.candidate = candidate
        self._temperatures = [table.model(name).temperature for name in candidate.levels]
        self._regression = table.is_regression

    @property
    def num_levels(self) -> int:
        return len(self.candidate.levels)

    def answer(self, level: int, output: LevelOutput, ensemble: Array | None = None) -> tuple[Answer, Array]:
        """The answer after `level`, and the ensemble to pass in after the next level (Eq. 6).

        ensemble: None for the first level that answers the text.
        """
        if ensemble is None:
            return self._first_answer(level, output)
        gap = self._gap_after(level - 1)
        if self._regression:
            number = combine(ensemble, output.logits, gap.w)
            return Answer(number, self._agreement(level, output), level), number
        mixed = combine(ensemble, softmax(output.logits), gap.w)
        # For a softmax, the logarithm of probabilities is as good as logits.
        calibrated = softmax(np.log(np.maximum(mixed, 1e-30)), gap.temperature)
        return Answer(mixed, float(calibrated.max()), level), mixed

    def p_continue(self, level: int, output: LevelOutput) -> float:
        """The probability with which a text goes on after `level` (Eqs. 3 and 4)."""
        if level >= self.num_levels:
            return 0.0
        if self._regression:
            confidence = self._agreement(level, output)
        else:
            confidence = float(softmax(output.logits, self._temperatures[level - 1]).max())
        return routing.p_large(confidence, self._gap_after(level).rule)

    def prune(self, texts: Sequence[bytes], level: int, output: LevelOutput) -> PrunedTexts:
        """What the level after `level` reads (Eq. 5): the whole texts where `level` has no importance."""
        alpha = self._gap_after(level).alpha
        if not alpha or output.importance is None or output.offsets is None:
            return PrunedTexts(list(texts), 0)
        return pruning.prune_texts(texts, output.offsets, output.importance, alpha)

    def _gap_after(self, level: int) -> Gap:
        return self.candidate.gaps[level - 1]

    def _first_answer(self, level: int, output: LevelOutput) -> tuple[Answer, Array]:
        if self._regression:
            return Answer(output.logits, self._agreement(level, output), level), output.logits
        probabilities = softmax(output.logits, self._temperatures[level - 1])
        return Answer(probabilities, float(probabilities.max()), level), softmax(output.logits)

    def _agreement(self, level: int, output: LevelOutput) -> float:
        # The last level has no next level to agree with.
        if level >= self.num_levels or output.embedding is None:
            return 1.0
        return agreement(output.embedding, self._gap_after(level).agreement)
