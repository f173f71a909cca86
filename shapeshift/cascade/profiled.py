"""One model on a labelled sample: what it made of it, how often it was right, and its temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.cascade import calibrate
from shapeshift.cascade.calibrate import Bin
from shapeshift.cascade.observe import Observed
from shapeshift.cascade.softmax import Array

Texts = Sequence[Sequence[bytes]]


@dataclass(frozen=True)
class Task:
    """truth: the right classes [n], or numbers; tolerance: 0, or for a regression within which a number is right."""

    texts: Texts
    truth: Array
    tolerance: float = 0.0

    @property
    def is_regression(self) -> bool:
        return self.tolerance > 0

    def right(self, answers: Array) -> Array:
        """1 where an answer is right [n]; answers: probabilities [n, classes], or numbers [n, 1]."""
        if self.is_regression:
            return np.asarray(np.abs(answers[:, 0] - self.truth) <= self.tolerance, dtype=float)
        return np.asarray(answers.argmax(axis=1) == self.truth, dtype=float)


@dataclass(frozen=True)
class Profiled:
    """One model and what it made of the sample; accuracy: 0 to 1; temperature: fitted on all of it; reliability: its
    table, each half of the texts under the temperature that the other half gives."""

    name: str
    seen: Observed
    accuracy: float
    temperature: float
    reliability: list[Bin]

    @property
    def ece(self) -> float:
        """The expected calibration error."""
        return calibrate.expected_error(self.reliability)

    @property
    def mean_ms(self) -> float:
        return float(self.seen.engine_ms.mean())


def profiled(name: str, seen: Observed, task: Task, fit: Array) -> Profiled:
    """Calibrate on all rows; measure the error where `fit`, a mask [n], parts them, each part by the other."""
    accuracy = float(task.right(seen.logits).mean())
    if task.is_regression:
        return Profiled(name, seen, accuracy, 1.0, [])
    temperature = calibrate.temperature(seen.logits, task.truth)
    sure = calibrate.confidences(seen.logits, temperature)
    for fitted in (fit, ~fit):
        if 0 < fitted.sum() < len(fitted):
            by_others = calibrate.temperature(seen.logits[fitted], task.truth[fitted])
            sure[~fitted] = calibrate.confidences(seen.logits[~fitted], by_others)
    return Profiled(name, seen, accuracy, temperature, calibrate.reliability(sure, task.right(seen.logits)))


def halves(count: int, seed: int = 0) -> Array:
    """A mask [count] with a random half set: what is fitted on it is measured on the rest."""
    mask = np.zeros(count, dtype=bool)
    mask[np.random.default_rng(seed).permutation(count)[: max(1, count // 2)]] = True
    return mask
