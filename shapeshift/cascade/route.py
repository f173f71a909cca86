"""Whether a query goes on to the next level (Tabi, Eqs. 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shapeshift.cascade.softmax import Array, softmax


@dataclass(frozen=True)
class Rule:
    """c: the confidence up to which every query goes on; k: the slope of the sigmoid above it; algorithm: its name."""

    c: float
    k: float = 10.0
    algorithm: str = "sigmoid"


def confidence(logits: Array, temperature: float) -> float:
    """The calibrated confidence in the most likely class of `logits` [classes] (Eq. 3)."""
    return float(softmax(logits, temperature).max())


def sigmoid(con: float, c: float, k: float) -> float:
    """The probability of Eq. 4: 1 up to c, above it falling from 1/(1 + exp(-k/2)) to 1/(1 + exp(k/2))."""
    if con <= c:
        return 1.0
    power = k * ((con - c) / (1 - c) - 0.5)
    # Written so that no exponential overflows.
    return 1 / (1 + math.exp(power)) if power < 0 else math.exp(-power) / (1 + math.exp(-power))


def cut(con: float, c: float, k: float) -> float:
    """The plain cut-off: 1 up to c, 0 above."""
    return 1.0 if con <= c else 0.0


ALGORITHMS: dict[str, Callable[[float, float, float], float]] = {"sigmoid": sigmoid, "cut": cut}


def p_large(con: float, rule: Rule) -> float:
    """The probability that a query with confidence `con` is given to the next level."""
    return ALGORITHMS[rule.algorithm](con, rule.c, rule.k)
