"""The mathematics between two levels: confidence, routing, and ensemble (Tabi, Eqs. 2, 3, 4 and 6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def softmax(logits: Array, temperature: float = 1.0) -> Array:
    """Probabilities over the last axis of `logits` (Eq. 2; with a temperature Eq. 3); no exponential overflows."""
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    powers = np.exp(scaled)
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def confidence(logits: Array, temperature: float = 1.0) -> Array:
    """The calibrated probability of the most likely class (Eq. 3). logits: [..., classes]; returns [...]."""
    return np.asarray(softmax(np.asarray(logits, dtype=float), temperature).max(axis=-1))


def agreement(embedding: Array, weights: Sequence[float]) -> float:
    """The confidence of a regression: the probability that the larger model's number is within the tolerance.

    A logistic model. embedding: [width]; weights: [width + 1], of `calibration.fit_agreement`.
    """
    power = float(embedding @ np.asarray(weights[:-1])) + weights[-1]
    return 1 / (1 + math.exp(-power)) if power >= 0 else math.exp(power) / (1 + math.exp(power))


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


@dataclass(frozen=True)
class RoutingRule:
    """c: every text with at most this confidence goes on; k: slope of the sigmoid above c; algorithm: its name."""

    c: float
    k: float = 10.0
    algorithm: str = "sigmoid"


def sigmoid(confidence: float, c: float, k: float) -> float:
    """The probability of Eq. 4: 1 up to c; above c it falls from 1/(1 + exp(-k/2)) to 1/(1 + exp(k/2))."""
    if confidence <= c:
        return 1.0
    power = k * ((confidence - c) / (1 - c) - 0.5)
    # Both forms are equal; neither exponential overflows.
    return 1 / (1 + math.exp(power)) if power < 0 else math.exp(-power) / (1 + math.exp(-power))


def cut(confidence: float, c: float, k: float) -> float:
    """The plain cut-off: 1 up to c, 0 above."""
    return 1.0 if confidence <= c else 0.0


ALGORITHMS: dict[str, Callable[[float, float, float], float]] = {"sigmoid": sigmoid, "cut": cut}


def p_large(confidence: float, rule: RoutingRule) -> float:
    """The probability that a text with this confidence goes on to the next level."""
    return ALGORITHMS[rule.algorithm](confidence, rule.c, rule.k)


def combine(small: Array, large: Array, w: float) -> Array:
    """w large + (1 - w) small (Eq. 6), of probabilities or of a regression's numbers."""
    return np.asarray(w * large + (1 - w) * small)


def ensemble_weight(small_right: Sequence[float] | Array, large_right: Sequence[float] | Array) -> float:
    """The large model's weight w = acc_L / (acc_S + acc_L) on the texts that go on; 0.5 where neither is ever right.

    Each argument holds 1 where that model's answer is right, else 0; or one accuracy.
    """
    small, large = (float(np.mean(right)) if len(right) else 0.0 for right in (small_right, large_right))
    return large / (small + large) if small + large > 0 else 0.5
