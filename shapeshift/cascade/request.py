"""A request on its way through the levels, and what is decided about each of its texts between two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shapeshift.cascade.candidates import Candidate, CandidateTable
from shapeshift.cascade.policy import pruning, routing
from shapeshift.cascade.policy.pruning import PrunedTexts
from shapeshift.cascade.policy.routing import Array, agreement, combine, softmax
from shapeshift.serving.front import Client
from shapeshift.serving.parameters import RequestParameters


@dataclass(frozen=True)
class LevelOutput:
    """What a level computed of one text. logits: [labels]; where the level has them, importance: [tokens], offsets:
    [tokens, 2] and embedding: [width]."""

    logits: Array
    importance: Array | None = None
    offsets: Array | None = None
    embedding: Array | None = None


class LevelResult(NamedTuple):
    """What a level computed of several rows. engine_ms: [rows]."""

    outputs: list[LevelOutput]
    engine_ms: Array


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

    @property
    def num_levels(self) -> int:
        return len(self.candidate.levels)

    def answer(self, level: int, output: LevelOutput, ensemble: Array | None = None) -> tuple[Answer, Array]:
        """The answer after `level`, and the ensemble to pass in after the next level (Eq. 6).

        ensemble: None for the first level that answers the text.
        """
        gap = self.candidate.gaps[level - 2] if level > 1 else None
        if self.table.is_regression:
            number = output.logits if ensemble is None or gap is None else combine(ensemble, output.logits, gap.w)
            return Answer(number, self._confidence(level, output), level), number
        if ensemble is None or gap is None:
            probabilities = softmax(output.logits, self._temperatures[level - 1])
            return Answer(probabilities, float(probabilities.max()), level), softmax(output.logits)
        mixed = combine(ensemble, softmax(output.logits), gap.w)
        # For a softmax, the logarithm of probabilities is as good as logits.
        calibrated = softmax(np.log(np.maximum(mixed, 1e-30)), gap.temperature)
        return Answer(mixed, float(calibrated.max()), level), mixed

    def p_continue(self, level: int, output: LevelOutput) -> float:
        """The probability with which a text goes on after `level` (Eqs. 3 and 4)."""
        if level >= self.num_levels:
            return 0.0
        return routing.p_large(self._confidence(level, output), self.candidate.gaps[level - 1].rule)

    def prune(self, texts: Sequence[bytes], level: int, output: LevelOutput) -> PrunedTexts:
        """What the level after `level` reads (Eq. 5): the whole texts where `level` has no importance."""
        alpha = self.candidate.gaps[level - 1].alpha
        if not alpha or output.importance is None or output.offsets is None:
            return PrunedTexts(list(texts), 0)
        return pruning.prune_texts(texts, output.offsets, output.importance, alpha)

    def _confidence(self, level: int, output: LevelOutput) -> float:
        """That of a level alone; of a regression, in that the next level will agree."""
        if not self.table.is_regression:
            return float(softmax(output.logits, self._temperatures[level - 1]).max())
        # The last level has no next level to agree with.
        if level >= self.num_levels or output.embedding is None:
            return 1.0
        return agreement(output.embedding, self.candidate.gaps[level - 1].agreement)


@dataclass(eq=False, slots=True)
class Row:
    """One text, or one pair of texts, of a request.

    texts, next_texts: what the last level that answered has read, and what the next one reads; next_pruned: words that
    it does not read; words_pruned: those that levels which have answered did not read; answer: the one so far, and the
    ensemble that the next level's output is added to; confidence: the first level's; num_tokens: that it has read;
    fell_back: whether a level failed, and the answer is that of an earlier one.
    """

    texts: list[bytes]
    next_texts: list[bytes]
    next_pruned: int = 0
    words_pruned: int = 0
    answer: Answer | None = None
    ensemble: Array | None = None
    confidence: float | None = None
    num_tokens: int = 0
    fell_back: bool = False
    engine_ms: float = 0.0
    control_ms: float = 0.0

    def record(self, answer: Answer, ensemble: Array) -> None:
        """Replace the answer: a level has answered `next_texts`."""
        self.answer, self.ensemble = answer, ensemble
        if answer.level == 1:
            self.confidence = answer.confidence
        self.texts = self.next_texts
        self.words_pruned += self.next_pruned
        self.next_pruned = 0

    @property
    def final(self) -> Answer:
        """The answer of a finished row."""
        assert self.answer is not None
        return self.answer


class ClassifyRequest:
    """The rows of a request. Calls done(request) once: when all rows are finished, or when `error` is set.

    client: who gets the answer, and `outputs` of it. control: the decisions of the candidate that serves it, which
    `begin` sets. deadline: monotonic seconds, None for none.
    """

    control: Control

    def __init__(
        self,
        client: Client,
        texts: Sequence[Sequence[bytes]],
        outputs: Sequence[str],
        params: RequestParameters,
        done: Callable[[ClassifyRequest], None],
    ) -> None:
        self.client = client
        self.outputs = outputs
        self.rows = [Row(list(row), list(row)) for row in texts]
        self.params = params
        self.arrived = time.monotonic()
        self.deadline = None if params.latency_ms is None else self.arrived + params.latency_ms / 1e3
        self.error: Exception | None = None
        self._done = done
        self._release: Callable[[], object] = bool
        self._unfinished = len(self.rows)
        self._lock = threading.Lock()

    def begin(self, control: Control, release: Callable[[], None]) -> None:
        """A candidate serves it from now on. release: called when it has ended."""
        self.control = control
        self._release = release

    def finish_rows(self, count: int) -> None:
        """Count further rows whose answer is final."""
        with self._lock:
            if not self._unfinished or not count:
                return
            self._unfinished -= count
            is_last = self._unfinished == 0
        if is_last:
            self._end()

    def fail(self, error: Exception) -> None:
        """End the request with `error`, unless it has ended."""
        with self._lock:
            if not self._unfinished:
                return
            self._unfinished = 0
            self.error = error
        self._end()

    def _end(self) -> None:
        self._release()
        self._done(self)
