"""The profile of one model on a labelled sample: outputs, accuracy, temperature, and reliability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.cascade.policy import calibration
from shapeshift.cascade.policy.calibration import ReliabilityBin
from shapeshift.cascade.policy.routing import Array, confidence
from shapeshift.cascade.profiling.observation import Observation

Texts = Sequence[Sequence[bytes]]


@dataclass(frozen=True)
class Task:
    """truth: the right class or number of each text [n]; choosing: a mask [n] of the texts that settings are fitted and
    chosen on; the others measure them. tolerance: a regression is right within it; else 0."""

    texts: Texts
    truth: Array
    choosing: Array
    tolerance: float = 0.0

    @property
    def scoring(self) -> Array:
        """A mask [n] of the texts that measure what was chosen."""
        return ~self.choosing

    @property
    def is_regression(self) -> bool:
        return self.tolerance > 0

    def right(self, answers: Array) -> Array:
        """1 where an answer is right, else 0 [n]. answers: probabilities or logits [n, classes], or numbers [n, 1]."""
        if self.is_regression:
            return np.asarray(np.abs(answers[:, 0] - self.truth) <= self.tolerance, dtype=float)
        return np.asarray(answers.argmax(axis=1) == self.truth, dtype=float)


@dataclass(frozen=True)
class ModelProfile:
    """One model on the sample. accuracy: on the choosing texts, 0 to 1; temperature: fitted on these; reliability: of
    the scoring texts with that temperature."""

    name: str
    observed: Observation
    accuracy: float
    temperature: float
    reliability: list[ReliabilityBin]

    @property
    def ece(self) -> float:
        """The expected calibration error."""
        return calibration.expected_calibration_error(self.reliability)

    @property
    def mean_ms(self) -> float:
        return float(self.observed.engine_ms.mean())


def profile_model(name: str, observed: Observation, task: Task) -> ModelProfile:
    """Fit the temperature on the choosing texts, and measure its reliability on the scoring texts."""
    logits, choosing, scoring = observed.logits, task.choosing, task.scoring
    right = task.right(logits)
    accuracy = float(right[choosing].mean())
    if task.is_regression:
        return ModelProfile(name, observed, accuracy, 1.0, [])
    temperature = calibration.fit_temperature(logits[choosing], task.truth[choosing])
    reliability = calibration.reliability(confidence(logits[scoring], temperature), right[scoring])
    return ModelProfile(name, observed, accuracy, temperature, reliability)


def random_half(count: int, seed: int = 0) -> Array:
    """A mask [count] with a random half set."""
    mask = np.zeros(count, dtype=bool)
    mask[np.random.default_rng(seed).permutation(count)[: max(1, count // 2)]] = True
    return mask
