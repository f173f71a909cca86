"""Requests by law, or those of a trace: what a load test and a simulation state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.workloads import adapters, arrivals, images, lengths, trace
from shapeshift.workloads.lengths import LogNormal, drifting
from shapeshift.workloads.trace import Trace

CSV = "csv"
_ARRIVALS: Mapping[str, Callable[[Load, np.random.Generator], NDArray[np.float64]]] = {
    "poisson": lambda load, rng: arrivals.poisson(load.rate, load.duration_s, rng),
    "mmpp": lambda load, rng: arrivals.mmpp(load.rate, load.duration_s, rng, arrivals.parse_states(load.states)),
    "constant": lambda load, rng: arrivals.constant(load.rate, load.duration_s),
    "fluctuating": lambda load, rng: arrivals.fluctuating(load.rate, load.duration_s, rng),
}
ARRIVALS = (*_ARRIVALS, CSV)
_MOST_REQUESTS = 100_000_000
_LAWS = {"short": lengths.short, "long": lengths.long}


@dataclass(frozen=True)
class Load:
    """A load. The same one with the same seed gives the same requests.

    arrivals     poisson; mmpp: in bursts; constant; fluctuating: the rate is drawn anew each second; csv: those of
                 `trace`
    rate         mean requests a second; csv has its own
    duration_s   length of the run; a csv trace ends here or earlier
    states       states of mmpp as weight:dwell_s pairs
    trace        CSV file of csv arrivals: at_s,length or the Azure LLM form
    rate_factor  factor on the rate of csv arrivals
    lengths      tokens of each text: short, long, a number, or a CSV file whose rows are drawn; csv has its own
    length_factor  factor on all lengths
    drift        amplitude of the drift of the median of short and long, in logarithms
    drift_s      its period
    max_length   tokens at which longer texts are cut; 0: none is
    latency_ms   the time in which answers are needed; 0: any; a trace may have its own
    adapters     adapters that requests name by a power law of their ranks; 0: none
    otas         whether requests are images of the query types of OTAS' Table II
    """

    arrivals: str = "poisson"
    rate: float = 50.0
    duration_s: float = 10.0
    states: str = "0.6:8,2.6:2"
    trace: str = ""
    rate_factor: float = 1.0
    lengths: str = "short"
    length_factor: float = 1.0
    drift: float = 0.0
    drift_s: float = 120.0
    max_length: int = 0
    latency_ms: float = 0.0
    adapters: int = 0
    otas: bool = False

    def __post_init__(self) -> None:
        require(self.arrivals in ARRIVALS, "arrivals", self.arrivals, f"one of {', '.join(ARRIVALS)}")
        is_csv = self.arrivals == CSV
        require(
            bool(self.trace) == is_csv, "trace", self.trace, "arrivals csv needs a trace file, and only csv takes one"
        )
        require(self.max_length == 0 or self.max_length >= 2, "max_length", self.max_length, "must be 0, or at least 2")
        for name in ("latency_ms", "drift"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, name, value, "must be at least 0")
        require(self.duration_s > 0, "duration_s", self.duration_s, "must be above 0")
        valid = math.isfinite(self.length_factor) and self.length_factor > 0
        require(valid, "length_factor", self.length_factor, "must be above 0")
        least = len(adapters.RANKS)
        require(
            self.adapters == 0 or self.adapters >= least, "adapters", self.adapters, f"must be 0, or {least} or more"
        )
        drawn = 0.0 if is_csv else self.rate * self.duration_s
        require(not drawn > _MOST_REQUESTS, "rate", self.rate, f"must give at most {_MOST_REQUESTS} requests")
        if not self.trace and not self.lengths.endswith(".csv"):
            law(self.lengths)

    def draw(self, seed: int | np.random.Generator) -> Trace:
        """The requests, by a seed or a generator.

        Raises InvalidInputError where there are none, and for a trace that cannot be used.
        """
        rng = np.random.default_rng(seed)
        if self.arrivals == CSV:
            requests = read(self.trace, self.rate_factor).until(self.duration_s)
        else:
            requests = self._with_lengths(_ARRIVALS[self.arrivals](self, rng), rng)
        require(
            len(requests) > 0, "duration_s", self.duration_s, "no request arrives within this time; use a longer one"
        )
        tokens = np.rint(requests.length * self.length_factor).clip(1, self.max_length or None).astype(np.int64)
        requests = replace(requests, length=tokens)
        if self.latency_ms and not requests.has("latency_ms"):
            requests = replace(requests, latency_ms=np.full(len(requests), self.latency_ms))
        if self.adapters:
            requests = replace(requests, lora_name=np.array(adapters.names(self.adapters, len(requests), rng)))
        return images.with_queries(requests, rng) if self.otas else requests

    def _with_lengths(self, at_s: NDArray[np.float64], rng: np.random.Generator) -> Trace:
        if self.lengths.endswith(".csv"):
            return read(self.lengths).resampled(at_s, rng)
        drawn_by = law(self.lengths)
        if self.drift:
            return Trace(at_s, drifting(drawn_by, at_s, self.drift, self.drift_s, rng))
        return Trace(at_s, drawn_by.sample(rng, len(at_s)))


def law(name: str) -> LogNormal:
    """The law of lengths with this name. Raises InvalidInputError."""
    if name in _LAWS:
        return _LAWS[name]()
    if name.isdecimal() and int(name) > 0:
        return lengths.fixed(int(name))
    raise InvalidInputError("lengths", name, "must be short, long, a number of tokens from 1, or a CSV file")


def read(file: str, rate_factor: float = 1.0) -> Trace:
    """As `trace.read`; InvalidInputError for a file that cannot be read."""
    try:
        return trace.read(Path(file), rate_factor)
    except OSError as error:
        raise InvalidInputError("trace", file, f"must be a readable file ({error.strerror})") from None
