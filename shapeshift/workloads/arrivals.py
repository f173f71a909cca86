"""Arrival processes: the instants at which an open-loop client means to send.

Each function returns float64 seconds from the start of the run, never decreasing, within [0, duration_s).
`rate` is the mean number of requests a second. Raises InvalidInputError for a rate or duration that is not
finite and positive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require


@dataclass(frozen=True)
class State:
    """One state of a Markov-modulated process: its rate relative to the others and its mean dwell time."""

    weight: float
    dwell_s: float

    def __post_init__(self) -> None:
        require(math.isfinite(self.weight) and self.weight >= 0, "weight", self.weight, "must be at least 0")
        require(math.isfinite(self.dwell_s) and self.dwell_s > 0, "dwell_s", self.dwell_s, "must be above 0")


BURSTY = (State(weight=0.6, dwell_s=8.0), State(weight=2.6, dwell_s=2.0))
"""A calm state and a burst of 4.3 times its rate, one fifth of the time; the weights' mean over time is 1."""


def constant(rate: float, duration_s: float) -> NDArray[np.float64]:
    """Evenly spaced instants, the first at 0."""
    _check(rate, duration_s)
    instants = np.arange(math.ceil(rate * duration_s), dtype=np.float64) / rate
    return instants[instants < duration_s]


def poisson(rate: float, duration_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A Poisson process: independent, exponentially distributed gaps."""
    _check(rate, duration_s)
    return _burst(rate, 0.0, duration_s, rng)


def mmpp(
    rate: float, duration_s: float, rng: np.random.Generator, states: Sequence[State] = BURSTY
) -> NDArray[np.float64]:
    """A Markov-modulated Poisson process, the bursty pattern of Arlo's evaluation (section 5).

    The process stays in a state for an exponentially distributed time of mean `dwell_s`, sending at a rate
    proportional to the state's `weight`, then moves to any other state with equal chance. The weights are
    scaled so that the mean over a long run is `rate`; a run of few dwell times can lie far from it. The
    first state is drawn with the chance it has in the long run.
    """
    _check(rate, duration_s)
    dwell = np.array([state.dwell_s for state in states])
    weight = np.array([state.weight for state in states])
    require(len(states) >= 1 and weight.sum() > 0, "states", states, "need a state of a weight above 0")
    # All states are visited equally often, so the share of time in each follows its dwell time alone.
    share = dwell / dwell.sum()
    rates = rate * weight / float(share @ weight)

    state = int(rng.choice(len(states), p=share))
    parts, start = [], 0.0
    while start < duration_s:
        end = min(start + rng.exponential(dwell[state]), duration_s)
        parts.append(_burst(rates[state], start, end, rng))
        if len(states) > 1:
            state = (state + int(rng.integers(1, len(states)))) % len(states)
        start = end
    return np.concatenate(parts)


def parse_states(text: str) -> tuple[State, ...]:
    """States written as `weight:dwell_s,weight:dwell_s,...`, e.g. `0.6:8,2.6:2`.

    Raises InvalidInputError for text of another form.
    """
    allowed = "must be weight:dwell_s pairs joined by commas, e.g. 0.6:8,2.6:2"
    states = []
    for pair in text.split(","):
        weight, _, dwell = pair.partition(":")
        try:
            states.append(State(float(weight), float(dwell)))
        except ValueError:
            raise InvalidInputError("states", text, allowed) from None
    return tuple(states)


def _burst(rate: float, start: float, end: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A Poisson process of one rate on [start, end): its count is Poisson, its instants sorted uniforms."""
    count = rng.poisson(rate * (end - start))
    instants = np.sort(rng.uniform(start, end, count))
    # The sum start + (end - start) * u can round up to `end`.
    return np.minimum(instants, np.nextafter(end, start))


def _check(rate: float, duration_s: float) -> None:
    require(math.isfinite(rate) and rate > 0, "rate", rate, "must be above 0 requests a second")
    require(math.isfinite(duration_s) and duration_s > 0, "duration_s", duration_s, "must be above 0 seconds")
