"""Arrival processes: the times at which an open-loop client sends its requests.

Each function returns float64 seconds from the start of the run, sorted, within [0, duration_s). `rate` is the mean
number of requests per second. Raises InvalidInputError for a rate or duration that is not finite and positive.
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
    """One state of a Markov-modulated process. weight: rate relative to the other states; dwell_s: mean dwell time."""

    weight: float
    dwell_s: float

    def __post_init__(self) -> None:
        require(math.isfinite(self.weight) and self.weight >= 0, "weight", self.weight, "must be at least 0")
        require(math.isfinite(self.dwell_s) and self.dwell_s > 0, "dwell_s", self.dwell_s, "must be above 0")


BURSTY = (State(weight=0.6, dwell_s=8.0), State(weight=2.6, dwell_s=2.0))
"""A calm state, and for one fifth of the time a burst of 4.3 times its rate. The time-weighted mean weight is 1."""


TWITTER_LIKE = (State(weight=0.8, dwell_s=8.0), State(weight=1.8, dwell_s=2.0))
"""Arlo's Twitter-Bursty (section 5): 1.8 times the rate for a fifth of the time."""
MAF_LIKE = (State(weight=0.45, dwell_s=8.0), State(weight=2.2, dwell_s=3.0))
"""Like the trace of Azure functions in OTAS' Fig. 8b: calm for most of the time, with bursts at five times the rate."""
_LEAST, _MOST = 200 / 450, 700 / 450


def constant(rate: float, duration_s: float) -> NDArray[np.float64]:
    """Evenly spaced arrivals, the first at 0."""
    _check(rate, duration_s)
    times = np.arange(math.ceil(rate * duration_s), dtype=np.float64) / rate
    return times[times < duration_s]


def poisson(rate: float, duration_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A Poisson process: independent, exponentially distributed gaps."""
    _check(rate, duration_s)
    return _burst(rate, 0.0, duration_s, rng)


def mmpp(
    rate: float, duration_s: float, rng: np.random.Generator, states: Sequence[State] = BURSTY
) -> NDArray[np.float64]:
    """A Markov-modulated Poisson process, the bursty pattern of Arlo's evaluation (section 5).

    The process stays in a state for an exponentially distributed time of mean `dwell_s`, with a rate proportional to
    the state's `weight`, then moves to any other state with equal probability. The weights are scaled so that the
    long-run mean is `rate`; a run of few dwell times can deviate from it. The first state has the probability of its
    share of time.
    """
    _check(rate, duration_s)
    dwell = np.array([state.dwell_s for state in states])
    weight = np.array([state.weight for state in states])
    require(len(states) >= 1 and weight.sum() > 0, "states", states, "must have a state with a weight above 0")
    # All states are visited equally often, so the share of time in a state depends only on its dwell time.
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


def fluctuating(rate: float, duration_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Poisson arrivals whose rate is drawn anew each second: 200 to 700 at a mean of 450 (OTAS, Fig. 8a)."""
    _check(rate, duration_s)
    rates = rng.uniform(_LEAST, _MOST, math.ceil(duration_s))
    rates *= rate / rates.mean()
    parts = [second + rng.uniform(0, 1, rng.poisson(each)) for second, each in enumerate(rates.tolist())]
    times = np.sort(np.concatenate(parts))
    return times[times < duration_s]


def parse_states(text: str) -> tuple[State, ...]:
    """States written as `weight:dwell_s,weight:dwell_s,...`, e.g. `0.6:8,2.6:2`.

    Raises InvalidInputError for any other text.
    """
    allowed = "must be weight:dwell_s pairs separated by commas, e.g. 0.6:8,2.6:2"
    states = []
    for pair in text.split(","):
        weight, _, dwell = pair.partition(":")
        try:
            states.append(State(float(weight), float(dwell)))
        except ValueError:
            raise InvalidInputError("states", text, allowed) from None
    return tuple(states)


def format_states(states: Sequence[State]) -> str:
    """The text that `parse_states` reads."""
    return ",".join(f"{state.weight:g}:{state.dwell_s:g}" for state in states)


def _burst(rate: float, start: float, end: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A homogeneous Poisson process on [start, end): a Poisson count of sorted uniform times."""
    count = rng.poisson(rate * (end - start))
    times = np.sort(rng.uniform(start, end, count))
    # The sum start + (end - start) * u can round up to `end`.
    return np.minimum(times, np.nextafter(end, start))


def _check(rate: float, duration_s: float) -> None:
    require(math.isfinite(rate) and rate > 0, "rate", rate, "must be above 0 requests per second")
    require(math.isfinite(duration_s) and duration_s > 0, "duration_s", duration_s, "must be above 0 seconds")
