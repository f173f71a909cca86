"""The answers of the levels that a query has seen, as one (Tabi, Eq. 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shapeshift.cascade.softmax import Array


def combine(small: Array, large: Array, w: float) -> Array:
    """w large + (1 - w) small: probabilities, or the numbers of a regression."""
    return np.asarray(w * large + (1 - w) * small)


def weight(small_right: Sequence[float] | Array, large_right: Sequence[float] | Array) -> float:
    """The large model's share, w = acc_L / (acc_S + acc_L), on the queries that go on; one half where none is right.

    Each is 1 where that model's answer is right, else 0.
    """
    small, large = (float(np.mean(right)) if len(right) else 0.0 for right in (small_right, large_right))
    return large / (small + large) if small + large > 0 else 0.5
