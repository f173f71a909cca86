"""What the engines make of each text, measured once in random order and shared by all systems that are compared."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shapeshift.cascade import ensemble
from shapeshift.cascade.control import Control, Level
from shapeshift.cascade.observe import ProfiledModel
from shapeshift.cascade.softmax import Array, softmax
from shapeshift.cascade.table import Candidate, Table
from shapeshift.cascade.words import left_of, spans

Key = tuple[str, float]
_WARM_UP = 30


@dataclass
class Pieces:
    """found[model, alpha][text]: what a model says of the text that the small model leaves at that alpha (0: whole) and
    its engine time in ms; pruned[alpha][text]: words that went."""

    texts: Sequence[Sequence[bytes]]
    truth: Array
    found: dict[Key, list[tuple[Level, float]]] = field(default_factory=dict)
    pruned: dict[float, list[int]] = field(default_factory=dict)

    @property
    def words(self) -> int:
        """Words of all texts."""
        return sum(len(spans(one)) for text in self.texts for one in text)


def measure(
    models: Mapping[str, ProfiledModel],
    small: str,
    larger: Sequence[str],
    alphas: Sequence[float],
    texts: Sequence[Sequence[bytes]],
    truth: Array,
    seed: int,
) -> Pieces:
    """Run every model over every text, and the larger ones over what the small one leaves of it."""
    made = Pieces(texts, truth)
    keys: list[Key] = [(name, 0.0) for name in models]
    keys += [(name, alpha) for name in larger for alpha in alphas if alpha]
    nothing: list[tuple[Level, float]] = [(Level(np.zeros(1)), 0.0)] * len(texts)
    made.found = {key: list(nothing) for key in keys}
    made.pruned = {alpha: [0] * len(texts) for alpha in alphas}
    shuffler = random.Random(seed)
    for model in models.values():
        for text in texts[:_WARM_UP]:
            model.one(text)
    for row in shuffler.sample(range(len(texts)), len(texts)):
        first, took = models[small].one(texts[row])
        made.found[small, 0.0][row] = first, took
        left = {0.0: list(texts[row])}
        for alpha in alphas:
            if alpha and first.importance is not None and first.offsets is not None:
                left[alpha], made.pruned[alpha][row] = left_of(texts[row], first.offsets, first.importance, alpha)
        rest = [key for key in keys if key != (small, 0.0)]
        shuffler.shuffle(rest)
        for name, alpha in rest:
            made.found[name, alpha][row] = models[name].one(left[alpha])
    return made


@dataclass(frozen=True)
class Answers:
    """Of one system on every text: right, level, time, of that control and the last engine, in ms, words gone."""

    right: Array
    level: Array
    ms: Array
    control_ms: Array
    last_ms: Array
    pruned: Array
    confidence: Array


def cascade(pieces: Pieces, table: Table, candidate: Candidate, seed: int) -> Answers:
    """A candidate's answers, with the decisions that serve, timed."""
    control, draws = Control(table, candidate), random.Random(seed)
    rows = [_one(pieces, control, row, draws) for row in range(len(pieces.texts))]
    return Answers(*(np.array(column, dtype=float) for column in zip(*rows, strict=True)))


def _one(pieces: Pieces, control: Control, row: int, draws: random.Random) -> tuple[float, ...]:
    levels = control.candidate.levels
    found, took = pieces.found[levels[0], 0.0][row]
    spent, controlled, gone = took, 0.0, 0
    for level in range(1, len(levels) + 1):
        before = time.perf_counter()
        if level == 1:
            answer, joined = control.first(1, found), control.to_join(found)
        else:
            answer, joined = control.joined(joined, level, found)
        onward = level < len(levels) and draws.random() < control.p_next(level, found)
        if onward:
            control.left_of(pieces.texts[row], level, found)
        controlled += (time.perf_counter() - before) * 1e3
        if not onward:
            break
        alpha = control.gap(1).alpha
        gone = pieces.pruned[alpha][row]
        found, took = pieces.found[levels[level], alpha][row]
        spent += took
    right = float(answer.probabilities.argmax() == pieces.truth[row])
    return right, answer.level, spent + controlled, controlled, took, gone, answer.confidence


def single(pieces: Pieces, model: str) -> Answers:
    """One model for every text."""
    logits = np.stack([level.logits for level, _ in pieces.found[model, 0.0]])
    times = np.array([took for _, took in pieces.found[model, 0.0]])
    right = np.asarray(logits.argmax(axis=1) == pieces.truth, dtype=float)
    none = np.zeros(len(times))
    return Answers(right, none + 1, times, none, times, none, softmax(logits).max(axis=1))


def voting(pieces: Pieces, models: Sequence[str], weights: Sequence[float]) -> Answers:
    """Cocktail's ensemble: all models at once, each on a core of its own, so that the slowest counts."""
    votes = [softmax(np.stack([level.logits for level, _ in pieces.found[name, 0.0]])) for name in models]
    mixed = votes[0]
    held = weights[0]
    for vote, weight in zip(votes[1:], weights[1:], strict=True):
        mixed = ensemble.combine(mixed, vote, weight / (held + weight))
        held += weight
    times = np.max([[took for _, took in pieces.found[name, 0.0]] for name in models], axis=0)
    none = np.zeros(len(times))
    right = np.asarray(mixed.argmax(axis=1) == pieces.truth, dtype=float)
    return Answers(right, none + 1, times, none, times, none, mixed.max(axis=1))
