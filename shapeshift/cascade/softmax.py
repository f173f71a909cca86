"""Probabilities from logits, exactly scaled so that no exponential overflows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def softmax(logits: Array, temperature: float = 1.0) -> Array:
    """Probabilities of the last axis of `logits` (Tabi, Eq. 2; with a temperature Eq. 3)."""
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    powers = np.exp(scaled)
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
