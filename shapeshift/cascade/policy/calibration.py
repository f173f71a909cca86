"""Fits that make a model's confidence match its accuracy (Tabi, section 4.1).

A classification gets a temperature for its softmax. A regression has no softmax: it gets a logistic model that predicts
whether the numbers of two models agree ("regression calibration").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.cascade.policy.routing import Array

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
# The bisection of 1/T ends at an interval of this width.
_PRECISION = 1e-12
_MAX_NEWTON_STEPS = 50
_CONVERGED = 1e-10


def fit_temperature(logits: Array, labels: Array) -> float:
    """The T that minimises the negative log-likelihood of `labels` [n] under softmax(logits / T).

    logits: [n, classes]. T is in [MIN_TEMPERATURE, MAX_TEMPERATURE]. The likelihood is concave in 1/T; its derivative
    is bisected. Data without a minimum: MIN_TEMPERATURE where every answer is right, MAX_TEMPERATURE where larger
    logits never help, 1 where the likelihood does not depend on T.
    Raises ValueError for no rows, fewer than two classes, or labels out of range.
    """
    values = np.asarray(logits, dtype=float)
    chosen = np.asarray(labels, dtype=np.int64)
    if values.ndim != 2 or values.shape[1] < 2 or not len(values) or chosen.shape != values.shape[:1]:
        raise ValueError("logits must be [n, classes] with n at least 1 and two classes, labels [n]")
    if chosen.min() < 0 or chosen.max() >= values.shape[1]:
        raise ValueError(f"labels must be between 0 and {values.shape[1] - 1}")
    values = values - values.max(axis=1, keepdims=True)
    of_label = values[np.arange(len(values)), chosen].mean()

    def slope(inverse: float) -> float:
        powers = np.exp(values * inverse)
        expected = (powers * values).sum(axis=1) / powers.sum(axis=1)
        return float(expected.mean() - of_label)

    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    if not values.any():
        return 1.0
    # of_label is 0 where every answer is right, also where the exponentials are too small to show a slope.
    if of_label == 0 or slope(high) <= 0:
        return MIN_TEMPERATURE
    if slope(low) >= 0:
        return MAX_TEMPERATURE
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


def fit_agreement(embeddings: Array, agree: Array, penalty: float = 1.0) -> list[float]:
    """The weights of the most likely logistic model of `routing.agreement`: one for each number of the embedding,
    then the constant.

    embeddings: [n, width]; agree: [n], 1 or 0; penalty: half the weight of the squared weights, not of the constant; it
    keeps the weights finite on separable data. Where all of `agree` are equal, only the constant is fitted, with one
    assumed case of the other kind. Raises ValueError for no rows.
    """
    rows = np.asarray(embeddings, dtype=float)
    target = np.asarray(agree, dtype=float)
    if rows.ndim != 2 or not len(rows) or target.shape != rows.shape[:1]:
        raise ValueError("embeddings must be [n, width] with n at least 1, agree [n]")
    share = (target.sum() + 0.5) / (len(target) + 1)
    weights = np.zeros(rows.shape[1] + 1)
    weights[-1] = math.log(share / (1 - share))
    if target.min() == target.max():
        return [float(value) for value in weights]
    design = np.hstack([rows, np.ones((len(rows), 1))])
    ridge = np.full(design.shape[1], penalty)
    ridge[-1] = 0.0
    for _ in range(_MAX_NEWTON_STEPS):
        likely = 1 / (1 + np.exp(-np.clip(design @ weights, -500, 500)))
        gradient = design.T @ (likely - target) + ridge * weights
        hessian = (design * (likely * (1 - likely))[:, None]).T @ design + np.diag(ridge + 1e-12)
        step = np.linalg.solve(hessian, gradient)
        # A Newton step may overshoot where the curve is flat.
        weights -= step / max(1.0, float(np.abs(step).max()) / 5)
        if float(np.abs(step).max()) < _CONVERGED:
            break
    return [float(value) for value in weights]


@dataclass(frozen=True)
class ReliabilityBin:
    """Answers with a confidence above `low`, at most `high`: how many, their mean confidence, and their accuracy."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def reliability(confidence: Array, right: Array, bins: int = 15) -> list[ReliabilityBin]:
    """The reliability table: `bins` intervals of equal width over [0, 1]; empty ones hold zeros."""
    edges = np.linspace(0, 1, bins + 1)
    bin_of = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    table = []
    for number in range(bins):
        member = bin_of == number
        count = int(member.sum())
        means = (float(confidence[member].mean()), float(np.mean(right[member]))) if count else (0.0, 0.0)
        table.append(ReliabilityBin(float(edges[number]), float(edges[number + 1]), count, *means))
    return table


def expected_calibration_error(table: Sequence[ReliabilityBin]) -> float:
    """The mean distance between confidence and accuracy, weighted by count."""
    total = sum(one.count for one in table)
    return sum(one.count * abs(one.confidence - one.accuracy) for one in table) / total if total else 0.0
