"""How likely two models' numbers agree, for regressions, which have no softmax to be sure by.

A logistic model on the small model's EMBEDDING, fitted to whether |small - large| is within a stated tolerance, takes
the place of the calibrated confidence of a classification (Tabi, section 4.1, "regression calibration").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shapeshift.cascade.softmax import Array

_ROUNDS = 50
_STOP = 1e-10


def fit(embeddings: Array, agree: Array, penalty: float = 1.0) -> list[float]:
    """The weights, one for each of the embedding's numbers and the constant last, of the most likely logistic model.

    embeddings: [n, width]; agree: [n], 1 or 0; penalty: half the weight of the squared weights (not the constant's),
    which keeps them finite on data that can be parted. With only one kind of answer the constant alone tells its
    share, of which one more case of the other kind was assumed. Raises ValueError for no rows.
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
    for _ in range(_ROUNDS):
        likely = 1 / (1 + np.exp(-np.clip(design @ weights, -500, 500)))
        slope = design.T @ (likely - target) + ridge * weights
        curve = (design * (likely * (1 - likely))[:, None]).T @ design + np.diag(ridge + 1e-12)
        step = np.linalg.solve(curve, slope)
        # A Newton step may overshoot where the curve is flat.
        weights -= step / max(1.0, float(np.abs(step).max()) / 5)
        if float(np.abs(step).max()) < _STOP:
            break
    return [float(value) for value in weights]


def confidence(embedding: Array, weights: Sequence[float]) -> float:
    """The probability that the larger model's number lies within the tolerance."""
    power = float(embedding @ np.asarray(weights[:-1])) + weights[-1]
    return 1 / (1 + math.exp(-power)) if power >= 0 else math.exp(power) / (1 + math.exp(power))
