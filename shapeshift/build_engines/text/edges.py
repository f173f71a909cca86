"""Chooses the lengths of a model's static engines: the edges of its length bins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shapeshift.build_engines.text.config import TextFrontConfig, length_histogram
from shapeshift.engines.execution.engine_set import cost_curve
from shapeshift.engines.manifest import EngineEntry
from shapeshift.engines.policy.packs import expected_ms
from shapeshift.polymorph.policy.bins import optimal_edges, step_ends

# A static engine is kept if it takes at most this fraction of the dynamic engine's time: less gain is timing noise, and
# not worth its memory.
KEEP_BELOW = 0.95
_STAIRCASE_STEP = 16


def probe_lengths(front: TextFrontConfig) -> list[int]:
    """The lengths at which static engines are timed to choose the edges."""
    longest = front.settings.max_tokens
    if front.settings.bins == "staircase":
        return sorted({*range(_STAIRCASE_STEP, longest, _STAIRCASE_STEP), longest})
    return sorted({min(longest, length) for length in (8, 16, 32, 64, 128, 256)} | {longest})


@dataclass(frozen=True)
class Curves:
    """Latency at each of `lengths`, ms: of the static engine of that length, and of the dynamic engine, if any."""

    lengths: list[int]
    static: list[float]
    dynamic: list[float] | None


class TooSlowError(Exception):
    """A text takes longer than it may, however the lengths of the engines are chosen. ms: at least so long."""

    def __init__(self, ms: float) -> None:
        super().__init__(f"a text takes at least {ms:.3g} ms")
        self.ms = ms


def choose_edges(
    front: TextFrontConfig, probe: Callable[[Sequence[int]], Curves], at_most_ms: float = math.inf
) -> list[int]:
    """The lengths of the static engines to compile. `probe` times engines at given lengths, at most once.

    at_most_ms: of a text alone, over the lengths that are expected. Raises TooSlowError.
    """
    explicit = front.settings.explicit_edges()
    if explicit is not None:
        return explicit
    curves = probe(probe_lengths(front))
    # What an engine for every length would take: fewer engines pad.
    best = curves.static if curves.dynamic is None else np.minimum(curves.static, curves.dynamic)
    of_lengths = np.interp(np.arange(front.settings.max_tokens + 1), curves.lengths, best)
    if (least := expected_ms(of_lengths.tolist(), length_histogram(front))) > at_most_ms:
        raise TooSlowError(least)
    if front.settings.bins == "staircase":
        return step_ends(curves.lengths, curves.static)
    every = np.arange(1, front.settings.max_tokens + 1)
    static = _smooth(curves.lengths, curves.static, every)
    dynamic = None
    if curves.dynamic is not None:
        dynamic = [ms * KEEP_BELOW for ms in _smooth(curves.lengths, curves.dynamic, every)]
    return optimal_edges(length_histogram(front), static, front.settings.max_bins, dynamic)[0]


def _smooth(lengths: Sequence[int], times: Sequence[float], at: npt.NDArray[np.int64]) -> list[float]:
    """A parabola fitted to `times`, at the lengths `at`: linear layers are linear in the length, attention quadratic.

    Without the fit, edges would follow the noise of a few points. The fit minimizes relative errors, so that short
    lengths count as much as long ones.
    """
    if len(lengths) < 4:
        return [float(ms) for ms in np.interp(at, lengths, times)]
    fit = np.polyfit(lengths, times, 2, w=1 / np.asarray(times))
    return [float(ms) for ms in np.maximum(np.polyval(fit, at), min(times))]


def keep_faster(
    front: TextFrontConfig, static: Sequence[EngineEntry], dynamic: EngineEntry | None
) -> list[EngineEntry]:
    """The static engines that are faster than the dynamic one over their bins, weighted by the length histogram.

    Edges that the settings list explicitly are all kept.
    """
    if dynamic is None or front.settings.explicit_edges() is not None:
        return list(static)
    ordered = sorted(static, key=lambda entry: entry.tokens or 0)
    longest = max((entry.tokens or 0 for entry in ordered), default=0)
    hist = np.asarray(length_histogram(front))
    # No text is as long as the packs of the last ones.
    hist = np.pad(hist, (0, max(0, longest - len(hist))))
    curve = cost_curve(dynamic, len(hist))[1:]
    faster, low = [], 0
    for entry in ordered:
        high = entry.tokens or 0
        weights = hist[low:high]
        if not weights.sum():
            weights = np.ones(high - low)
        if entry.latency[0].best_ms < KEEP_BELOW * float(np.average(curve[low:high], weights=weights)):
            faster.append(entry)
            # The lengths of a dropped bin use the dynamic engine, not the next edge.
        low = high
    return faster
