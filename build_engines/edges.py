"""Which static lengths a model gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from build_engines.settings import FrontModel, read_json
from shapeshift.engines.ladder import cost_curve
from shapeshift.engines.manifest import EngineEntry
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.bins import optimal_edges
from shapeshift.polymorph.staircase import step_ends

# A static engine stays only where it beats the dynamic one by more than timing noise and the memory it takes.
_WORTH = 0.95
_STAIRCASE_STEP = 16


def probe_lengths(model: FrontModel) -> list[int]:
    """The lengths at which static engines are timed before the edges are chosen."""
    longest = model.settings.max_tokens
    if model.settings.bins == "staircase":
        return sorted({*range(_STAIRCASE_STEP, longest, _STAIRCASE_STEP), longest})
    return sorted({min(longest, length) for length in (8, 16, 32, 64, 128, 256)} | {longest})


def length_histogram(model: FrontModel) -> list[float]:
    """Requests by length 1, 2, ... max_tokens: the model's own file, or every octave equally likely."""
    longest = model.settings.max_tokens
    if not model.settings.length_histogram:
        return [1.0 / length for length in range(1, longest + 1)]
    path = model.folder / model.settings.length_histogram
    counts = read_json(path, "length_histogram")
    usable = isinstance(counts, list) and len(counts) <= longest
    if not usable or not all(isinstance(c, int | float) and c >= 0 for c in counts) or not any(counts):
        raise InvalidInputError("length_histogram", str(path), f"a list of 1 to {longest} counts, not all zero")
    return [*counts, *[0.0] * (longest - len(counts))]


@dataclass(frozen=True)
class Curves:
    """Latency by length, ms: of static engines of that length, and of the dynamic engine if there is one."""

    lengths: list[int]
    static: list[float]
    dynamic: list[float] | None


def choose(model: FrontModel, probe: Callable[[Sequence[int]], Curves]) -> list[int]:
    """The static lengths to compile. `probe` times engines at given lengths; called at most once."""
    explicit = model.settings.explicit_edges()
    if explicit is not None:
        return explicit
    curves = probe(probe_lengths(model))
    if model.settings.bins == "staircase":
        return step_ends(curves.lengths, curves.static)
    every = np.arange(1, model.settings.max_tokens + 1)
    static = _smooth(curves.lengths, curves.static, every)
    dynamic = None
    if curves.dynamic is not None:
        dynamic = [ms * _WORTH for ms in _smooth(curves.lengths, curves.dynamic, every)]
    return optimal_edges(length_histogram(model), static, model.settings.max_bins, dynamic)[0]


def _smooth(lengths: Sequence[int], times: Sequence[float], at: npt.NDArray[np.int64]) -> list[float]:
    """`times` as a parabola in the length: linear layers are straight in it, attention is square.

    A few noisy points would otherwise draw edges to wherever the noise happened to be low. The fit is of
    relative errors, so that short lengths count as much as long ones.
    """
    if len(lengths) < 4:
        return [float(ms) for ms in np.interp(at, lengths, times)]
    fit = np.polyfit(lengths, times, 2, w=1 / np.asarray(times))
    return [float(ms) for ms in np.maximum(np.polyval(fit, at), min(times))]


def worth_keeping(model: FrontModel, static: Sequence[EngineEntry], dynamic: EngineEntry | None) -> list[EngineEntry]:
    """The static engines that are faster than the dynamic one for the lengths that would use them.

    Explicit edges are kept as asked. The comparison weighs the lengths of each bin by the histogram.
    """
    if dynamic is None or model.settings.explicit_edges() is not None:
        return list(static)
    hist = np.asarray(length_histogram(model))
    curve = cost_curve(dynamic, len(hist))[1:]
    kept, low = [], 0
    for entry in sorted(static, key=lambda entry: entry.tokens or 0):
        high = entry.tokens or 0
        weights = hist[low:high]
        if not weights.sum():
            weights = np.ones(high - low)
        if entry.latency[0].best_ms < _WORTH * float(np.average(curve[low:high], weights=weights)):
            kept.append(entry)
            # A dropped bin's lengths go to the dynamic engine, not to the next edge.
        low = high
    return kept
