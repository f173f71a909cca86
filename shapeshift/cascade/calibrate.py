"""The temperature that makes a model's confidence agree with how often it is right (Tabi, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.cascade.softmax import Array, softmax

LEAST, MOST = 0.05, 20.0
# The interval of 1/T is halved until it is this small.
_PRECISION = 1e-12


def temperature(logits: Array, labels: Array) -> float:
    """The T in [LEAST, MOST] that minimises the negative log-likelihood of `labels` [n] under softmax(logits / T).

    logits: [n, classes]. The likelihood is concave in 1/T, whose derivative is bisected. Data on which every answer
    is right have no minimum and give LEAST; where larger logits never help, MOST; where nothing depends on it, 1.
    Raises ValueError for no rows, fewer than two classes or labels that are none of them.
    """
    values = np.asarray(logits, dtype=float)
    chosen = np.asarray(labels, dtype=np.int64)
    if values.ndim != 2 or values.shape[1] < 2 or not len(values) or chosen.shape != values.shape[:1]:
        raise ValueError("logits must be [n, classes] with n at least 1 and two classes, labels [n]")
    if chosen.min() < 0 or chosen.max() >= values.shape[1]:
        raise ValueError(f"labels must lie between 0 and {values.shape[1] - 1}")
    values = values - values.max(axis=1, keepdims=True)
    own = values[np.arange(len(values)), chosen].mean()

    def slope(inverse: float) -> float:
        powers = np.exp(values * inverse)
        expected = (powers * values).sum(axis=1) / powers.sum(axis=1)
        return float(expected.mean() - own)

    low, high = 1 / MOST, 1 / LEAST
    if not values.any():
        return 1.0
    # The first where every answer is right, also where the exponentials are too small for a slope to show.
    if own == 0 or slope(high) <= 0:
        return LEAST
    if slope(low) >= 0:
        return MOST
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


@dataclass(frozen=True)
class Bin:
    """Answers whose confidence lies above `low` and not above `high`: how many, their mean confidence and accuracy."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def confidences(logits: Array, temperature_: float) -> Array:
    """The calibrated confidence of each row, [n] (Eq. 3)."""
    return np.asarray(softmax(np.asarray(logits, dtype=float), temperature_).max(axis=-1))


def reliability(confidence: Array, right: Array, bins: int = 15) -> list[Bin]:
    """The reliability table: `bins` intervals of equal width over [0, 1]; empty ones hold zeros."""
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    table = []
    for number in range(bins):
        member = place == number
        count = int(member.sum())
        means = (float(confidence[member].mean()), float(np.mean(right[member]))) if count else (0.0, 0.0)
        table.append(Bin(float(edges[number]), float(edges[number + 1]), count, *means))
    return table


def expected_error(table: Sequence[Bin]) -> float:
    """The expected calibration error: the mean distance of confidence and accuracy, weighted by count."""
    total = sum(one.count for one in table)
    return sum(one.count * abs(one.confidence - one.accuracy) for one in table) / total if total else 0.0
