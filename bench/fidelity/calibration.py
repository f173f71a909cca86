"""The times of a simulation, from what a server reported of its calls under one load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Values = Mapping[str, Any]
"""What an event of a server says."""
_MEDIAN, _P99, _BEST = 1, 2, 3
"""Places in a point of a profile."""


def text_profile(profile: Mapping[str, Any], packs: Sequence[Values]) -> dict[str, Any]:
    """A front's profile with the medians and p99s of these calls. The best times, by which a front decides, stay.

    Engines that were not called are as much faster or slower as the others; all have the same spread.
    """
    statics = {engine["tokens"] for engine in profile["engines"]}
    calls = [(one["size"] if one["size"] in statics else None, one["tokens"], one["ms"]) for one in packs]
    engines = [
        _fitted(engine, [call[1:] for call in calls if call[0] == engine["tokens"]], _MEDIAN)
        for engine in _scaled(profile["engines"], calls, "tokens", _MEDIAN)
    ]
    means = {engine["tokens"]: np.array(engine["latency"]) for engine in engines}
    ratios = [ms / np.interp(tokens, means[of][:, 0], means[of][:, _MEDIAN]) for of, tokens, ms in calls]
    median, p99 = np.percentile(ratios or [1.0], [50, 99]).tolist()
    for engine in engines:
        for point in engine["latency"]:
            point[_MEDIAN], point[_P99] = median * point[_MEDIAN], p99 * point[_MEDIAN]
    return {**profile, "engines": engines}


def image_profile(profile: Mapping[str, Any], batches: Sequence[Values]) -> list[dict[str, Any]]:
    """The entries of an image profile for simulations: by gamma the mean times of batches."""
    calls = [(one["gamma"], one["images"], one["ms"]) for one in batches]
    gammas = [
        _fitted(entry, [call[1:] for call in calls if call[0] == entry["gamma"]], _BEST)
        for entry in _scaled(profile["gammas"], calls, "gamma", _BEST)
    ]
    return [
        {
            **{name: entry[name] for name in ("gamma", "tokens", "memory_mb")},
            "latency_ms": {str(point[0]): point[_BEST] for point in entry["latency"]},
        }
        for entry in gammas
    ]


def _scaled(
    entries: Sequence[Mapping[str, Any]], calls: Sequence[tuple[Any, int, float]], key: str, place: int
) -> list[dict[str, Any]]:
    """The entries, by the ratio of what the calls took to what their entries say."""
    by_key = {entry[key]: np.array(entry["latency"]) for entry in entries}
    profiled_ms = sum(float(np.interp(size, by_key[of][:, 0], by_key[of][:, place])) for of, size, _ in calls)
    ratio = sum(ms for *_, ms in calls) / profiled_ms if calls else 1.0
    return [
        {
            **entry,
            "latency": [[*point[:place], point[place] * ratio, *point[place + 1 :]] for point in entry["latency"]],
        }
        for entry in entries
    ]


def _fitted(entry: Mapping[str, Any], calls: Sequence[tuple[int, float]], place: int) -> dict[str, Any]:
    """An entry whose curve is the least squares fit to calls of (size, ms); each of its points weighs as one call."""
    points = np.array(entry["latency"], float)
    corners = np.eye(len(points))
    sizes, took_ms = np.array([*calls, *zip(points[:, 0], points[:, place], strict=True)]).T
    hats = np.stack([np.interp(sizes, points[:, 0], corner) for corner in corners], axis=1)
    points[:, place] = np.linalg.lstsq(hats, took_ms, rcond=None)[0].clip(min=took_ms.min() / 2)
    return {**entry, "latency": [[int(point[0]), *point[1:]] for point in points.tolist()]}


@dataclass(frozen=True)
class Counted:
    """The work of a decode loop under one load. ranks: of the adapter of each row, over all iterations."""

    iterations: float
    ms: float
    rows: float
    prompt_tokens: float
    ranks: float = 0.0


def iteration_times(loads: Sequence[Counted]) -> dict[str, float]:
    """base_s, row_s, token_s and, where there are adapters, rank_s of an iteration: least squares, none below 0."""
    # Noise of a sum grows with the root of its terms.
    weights = 1 / np.sqrt([load.iterations for load in loads])
    work = np.array([[load.iterations, load.rows, load.prompt_tokens, load.ranks] for load in loads])
    # All columns alike, or the small ones get lost.
    scale = np.maximum(work.max(axis=0), 1.0)
    took_s = np.array([load.ms / 1e3 for load in loads])
    terms, _ = nnls(work / scale * weights[:, None], took_s * weights)
    times = dict(zip(("base_s", "row_s", "token_s", "rank_s"), (terms / scale).tolist(), strict=True))
    return times if work[:, 3].any() else {name: value for name, value in times.items() if name != "rank_s"}


def level_times(
    latency_ms: NDArray[np.float64], engine_ms: NDArray[np.float64], level: NDArray[np.int64]
) -> tuple[float, float]:
    """The time beside the engines of a text that the first level answers, and of a call to the second; of texts that
    come alone. engine_ms: [texts], of all levels of a text."""
    beside_ms = latency_ms - engine_ms
    first_ms = float(beside_ms[level == 1].mean())
    return first_ms, max(0.0, float(beside_ms[level == 2].mean()) - first_ms)


def toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """The text of a scenario."""
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"
