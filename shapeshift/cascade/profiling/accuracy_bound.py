"""The lower bound of an accuracy on a sample: what `min_accuracy` is compared with."""

from __future__ import annotations

import math

import numpy as np

from shapeshift.cascade.policy.routing import Array

# All bounds of one table hold together with this probability.
CONFIDENCE = 0.95
# Bounds are rounded down to four digits.
_STEPS = 10_000
_BISECTIONS = 60
_ROUNDING = 1e-6


def accuracy_bound(chances: Array, compared: int) -> float:
    """The lower bound of the accuracy on new texts, with four digits.

    chances: the chance of a right answer to each text [n], over the draws of Eq. 4; the texts must have had no part in
    any choice. compared: how many bounds hold together with CONFIDENCE, whichever of them is then picked (Bonferroni).
    """
    # The expected number of right answers varies less than that of one draw for each text, which is binomial.
    right = int(chances.sum() + _ROUNDING)
    bound = clopper_pearson(right, len(chances), (1 - CONFIDENCE) / compared)
    return math.floor(bound * _STEPS) / _STEPS


def clopper_pearson(right: int, count: int, risk: float) -> float:
    """The one-sided lower bound of a share, after `right` of `count` draws; above the true share at most with `risk`.

    risk: above 0, below 0.5. It is the share with which `right` or more would come with probability `risk`.
    """
    if not right:
        return 0.0
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    hits = np.arange(right, count + 1)
    log_ways = log_factorial[count] - log_factorial[hits] - log_factorial[count - hits]
    low, high = 0.0, right / count
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        tail = np.exp(log_ways + hits * math.log(middle) + (count - hits) * math.log1p(-middle)).sum()
        low, high = (low, middle) if tail > risk else (middle, high)
    return low
