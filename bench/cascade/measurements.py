"""Outputs and times of every model on every text, measured once; all systems are computed from them."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shapeshift.cascade.candidates import Candidate, CandidateTable, ServingCandidate
from shapeshift.cascade.policy.pruning import prune_texts
from shapeshift.cascade.policy.routing import Array, LevelOutput, softmax
from shapeshift.cascade.profiling.observation import ModelRunner

_WARM_UP = 30


class InputKey(NamedTuple):
    """A model and its input: whole texts, or texts that `pruner` has pruned at `alpha`."""

    model: str
    pruner: str = ""
    alpha: float = 0.0


def input_key(candidate: Candidate, level: int) -> InputKey:
    """The model and input of a level of a candidate, counted from 0."""
    alpha = candidate.gaps[0].alpha if level else 0.0
    return InputKey(candidate.levels[level], candidate.levels[0], alpha) if alpha else InputKey(candidate.levels[level])


@dataclass
class Measurements:
    """The measurements of a set of texts.

    truth    the number of each text's label
    outputs  [key][text]: a model's output and its engine time in ms
    pruned   [pruner, alpha][text]: the number of words that are pruned
    """

    texts: Sequence[Sequence[bytes]]
    truth: Array
    outputs: dict[InputKey, list[tuple[LevelOutput, float]]] = field(default_factory=dict)
    pruned: dict[tuple[str, float], list[int]] = field(default_factory=dict)


def measure(
    models: Mapping[str, ModelRunner],
    candidates: Sequence[Candidate],
    texts: Sequence[Sequence[bytes]],
    truth: Array,
    seed: int,
) -> Measurements:
    """Run every model on every text, and the candidates' levels on their pruned texts; texts in random order."""
    measured = Measurements(texts, truth)
    keys = {input_key(one, level) for one in candidates for level in range(len(one.levels))} | set(
        map(InputKey, models)
    )
    nothing: list[tuple[LevelOutput, float]] = [(LevelOutput(np.zeros(1)), 0.0)] * len(texts)
    measured.outputs = {key: list(nothing) for key in sorted(keys)}
    cuts = sorted({(key.pruner, key.alpha) for key in keys if key.alpha})
    measured.pruned = {cut: [0] * len(texts) for cut in cuts}
    pruners = sorted({pruner for pruner, _ in cuts})
    rest = sorted(keys - set(map(InputKey, pruners)))
    shuffler = random.Random(seed)
    for model in models.values():
        for text in texts[:_WARM_UP]:
            model.run_one(text)
    for row in shuffler.sample(range(len(texts)), len(texts)):
        left = {("", 0.0): list(texts[row])}
        for pruner in pruners:
            measured.outputs[InputKey(pruner)][row] = models[pruner].run_one(texts[row])
        for pruner, alpha in cuts:
            first, _ = measured.outputs[InputKey(pruner)][row]
            left[pruner, alpha] = list(texts[row])
            if first.importance is not None and first.offsets is not None:
                left_of = prune_texts(texts[row], first.offsets, first.importance, alpha)
                left[pruner, alpha], measured.pruned[pruner, alpha][row] = left_of
        shuffler.shuffle(rest)
        for key in rest:
            measured.outputs[key][row] = models[key.model].run_one(left[key.pruner, key.alpha])
    return measured


@dataclass(frozen=True)
class Answers:
    """One system's answers to every text; arrays are [texts].

    right: whether the label is right. level: the last level, from 1. ms: engines and control in all; control_ms: of it.
    """

    right: Array
    level: Array
    ms: Array
    control_ms: Array
    confidence: Array


def run_cascade(measured: Measurements, table: CandidateTable, candidate: Candidate, seed: int) -> Answers:
    """A candidate's answers, by the decisions of the server, which are timed."""
    serving, draws = ServingCandidate(table, candidate), random.Random(seed)
    rows = [_one(measured, serving, row, draws) for row in range(len(measured.texts))]
    return Answers(*(np.array(column, dtype=float) for column in zip(*rows, strict=True)))


def _one(measured: Measurements, serving: ServingCandidate, row: int, draws: random.Random) -> tuple[float, ...]:
    levels = serving.candidate.levels
    outputs, took = measured.outputs[InputKey(levels[0])][row]
    spent, controlled = took, 0.0
    ensemble: Array | None = None
    for level in range(1, len(levels) + 1):
        before = time.process_time()
        answer, ensemble = serving.answer(level, outputs, ensemble)
        onward = level < len(levels) and draws.random() < serving.p_continue(level, outputs)
        if onward:
            serving.prune(measured.texts[row], level, outputs)
        controlled += (time.process_time() - before) * 1e3
        if not onward:
            break
        outputs, took = measured.outputs[input_key(serving.candidate, level)][row]
        spent += took
    right = float(answer.probabilities.argmax() == measured.truth[row])
    return right, answer.level, spent + controlled, controlled, answer.confidence


def run_single(measured: Measurements, model: str) -> Answers:
    """One model on every text."""
    logits = np.stack([level.logits for level, _ in measured.outputs[InputKey(model)]])
    times = np.array([took for _, took in measured.outputs[InputKey(model)]])
    right = np.asarray(logits.argmax(axis=1) == measured.truth, dtype=float)
    none = np.zeros(len(times))
    return Answers(right, none + 1, times, none, softmax(logits).max(axis=1))
