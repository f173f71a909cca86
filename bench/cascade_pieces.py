"""What the engines make of each text, measured once in random order and shared by all systems that are compared."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shapeshift.cascade import ensemble
from shapeshift.cascade.control import Control, Level
from shapeshift.cascade.observe import ProfiledModel
from shapeshift.cascade.softmax import Array, softmax
from shapeshift.cascade.table import Candidate, Table
from shapeshift.cascade.words import left_of, spans

_WARM_UP = 30


class Key(NamedTuple):
    """What a model reads: whole texts, or what is left of them where `pruner` prunes at `alpha`."""

    model: str
    pruner: str = ""
    alpha: float = 0.0


def read_by(candidate: Candidate, level: int) -> Key:
    """What a level of a candidate, counted from 0, reads."""
    alpha = candidate.gaps[0].alpha if level else 0.0
    return Key(candidate.levels[level], candidate.levels[0], alpha) if alpha else Key(candidate.levels[level])


@dataclass
class Pieces:
    """found[key][text]: what a model says of a text and its engine time in ms; pruned[pruner, alpha][text]: words that
    went; packing[model]: how many such models the machine runs at once, 1 where it is not known.
    """

    texts: Sequence[Sequence[bytes]]
    truth: Array
    found: dict[Key, list[tuple[Level, float]]] = field(default_factory=dict)
    pruned: dict[tuple[str, float], list[int]] = field(default_factory=dict)
    packing: dict[str, int] = field(default_factory=dict)

    @property
    def words(self) -> int:
        """Words of all texts."""
        return sum(len(spans(one)) for text in self.texts for one in text)

    def cost(self, model: str, ms: float) -> float:
        """What so much time of a model costs: the share of the machine that it takes, in ms (Tabi, section 7.1)."""
        return ms / self.packing.get(model, 1)


def measure(
    models: Mapping[str, ProfiledModel],
    candidates: Sequence[Candidate],
    texts: Sequence[Sequence[bytes]],
    truth: Array,
    seed: int,
) -> Pieces:
    """Run every model over every text, and what the candidates' levels read of it, those that prune first."""
    made = Pieces(texts, truth)
    keys = {read_by(one, level) for one in candidates for level in range(len(one.levels))} | set(map(Key, models))
    nothing: list[tuple[Level, float]] = [(Level(np.zeros(1)), 0.0)] * len(texts)
    made.found = {key: list(nothing) for key in sorted(keys)}
    cuts = sorted({(key.pruner, key.alpha) for key in keys if key.alpha})
    made.pruned = {cut: [0] * len(texts) for cut in cuts}
    pruners = sorted({pruner for pruner, _ in cuts})
    rest = sorted(keys - set(map(Key, pruners)))
    shuffler = random.Random(seed)
    for model in models.values():
        for text in texts[:_WARM_UP]:
            model.one(text)
    for row in shuffler.sample(range(len(texts)), len(texts)):
        left = {("", 0.0): list(texts[row])}
        for pruner in pruners:
            made.found[Key(pruner)][row] = models[pruner].one(texts[row])
        for pruner, alpha in cuts:
            first, _ = made.found[Key(pruner)][row]
            left[pruner, alpha] = list(texts[row])
            if first.importance is not None and first.offsets is not None:
                made_of = left_of(texts[row], first.offsets, first.importance, alpha)
                left[pruner, alpha], made.pruned[pruner, alpha][row] = made_of
        shuffler.shuffle(rest)
        for key in rest:
            made.found[key][row] = models[key.model].one(left[key.pruner, key.alpha])
    return made


@dataclass(frozen=True)
class Answers:
    """Of one system on every text: right, level, time, of that control and the last engine, in ms, words gone, cost."""

    right: Array
    level: Array
    ms: Array
    control_ms: Array
    last_ms: Array
    pruned: Array
    confidence: Array
    cost: Array


def cascade(pieces: Pieces, table: Table, candidate: Candidate, seed: int) -> Answers:
    """A candidate's answers, with the decisions that serve, timed."""
    control, draws = Control(table, candidate), random.Random(seed)
    rows = [_one(pieces, control, row, draws) for row in range(len(pieces.texts))]
    return Answers(*(np.array(column, dtype=float) for column in zip(*rows, strict=True)))


def _one(pieces: Pieces, control: Control, row: int, draws: random.Random) -> tuple[float, ...]:
    levels = control.candidate.levels
    found, took = pieces.found[Key(levels[0])][row]
    spent, controlled, gone, cost = took, 0.0, 0, pieces.cost(levels[0], took)
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
        key = read_by(control.candidate, level)
        gone = pieces.pruned[key.pruner, key.alpha][row] if key.alpha else 0
        found, took = pieces.found[key][row]
        spent += took
        cost += pieces.cost(levels[level], took)
    right = float(answer.probabilities.argmax() == pieces.truth[row])
    return right, answer.level, spent + controlled, controlled, took, gone, answer.confidence, cost


def single(pieces: Pieces, model: str) -> Answers:
    """One model for every text."""
    logits = np.stack([level.logits for level, _ in pieces.found[Key(model)]])
    times = np.array([took for _, took in pieces.found[Key(model)]])
    right = np.asarray(logits.argmax(axis=1) == pieces.truth, dtype=float)
    none = np.zeros(len(times))
    cost = np.array([pieces.cost(model, took) for took in times])
    return Answers(right, none + 1, times, none, times, none, softmax(logits).max(axis=1), cost)


def voting(pieces: Pieces, models: Sequence[str], weights: Sequence[float]) -> Answers:
    """Cocktail's ensemble: all models at once, each on a core of its own, so that the slowest counts."""
    votes = [softmax(np.stack([level.logits for level, _ in pieces.found[Key(name)]])) for name in models]
    mixed = votes[0]
    held = weights[0]
    for vote, weight in zip(votes[1:], weights[1:], strict=True):
        mixed = ensemble.combine(mixed, vote, weight / (held + weight))
        held += weight
    each = [[took for _, took in pieces.found[Key(name)]] for name in models]
    times = np.max(each, axis=0)
    cost = np.sum([[pieces.cost(name, took) for took in own] for name, own in zip(models, each, strict=True)], axis=0)
    none = np.zeros(len(times))
    right = np.asarray(mixed.argmax(axis=1) == pieces.truth, dtype=float)
    return Answers(right, none + 1, times, none, times, none, mixed.max(axis=1), cost)
