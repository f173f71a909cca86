"""A simulated front and its engines, from latencies that were measured or are assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.engines.execution.engine_set import row_slots
from shapeshift.engines.hardware import cores
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest
from shapeshift.errors import InvalidInputError
from shapeshift.sidecar.front_config import Front, read_front
from shapeshift.triton.names import qualified

NAME = "front"
"""Of the simulated front model."""
_STATED = "{lengths, latency_ms}, or the profile of a generated config.pbtxt, {engines}"


def read(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises InvalidInputError."""
    try:
        return parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeError) as error:
        raise InvalidInputError("profile", str(file), f"must be a readable JSON file ({error})") from None


def parse(text: str, file: str) -> dict[str, Any]:
    """The JSON object in the text of `file`. Raises InvalidInputError."""
    try:
        profile = json.loads(text)
    except ValueError as error:
        raise InvalidInputError("profile", file, f"must be a readable JSON file ({error})") from None
    if not isinstance(profile, dict) or not ({"lengths", "latency_ms"} <= profile.keys() or "engines" in profile):
        raise InvalidInputError("profile", file, f"must hold {_STATED}")
    return profile


def engines(
    profile: Mapping[str, Any], edges: Sequence[int], dynamic: bool = True, packing: bool = True, factor: float = 1.0
) -> Manifest:
    """Engines of these latencies, times `factor`: one for each of `edges`, longest texts of bins, and a dynamic one.

    profile: {lengths, latency_ms}: those of texts of some lengths, with linear interpolation between them; or the one
    of a generated config.pbtxt, which has its own engines. Raises InvalidInputError where it lacks a length.
    """
    try:
        if "engines" in profile:
            entries = [_entry(one, factor) for one in profile["engines"]]
            if not all([entries, *(entry.latency for entry in entries)]):
                raise ValueError("an engine without latencies, or none")
        else:
            tokens = [int(length) for length in profile["lengths"]]
            latency_ms = [factor * float(ms) for ms in profile["latency_ms"]]
            entries = _stated(tokens, latency_ms, edges, dynamic, packing)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidInputError("profile", sorted(profile), f"must hold {_STATED} ({error!r})") from None
    for entry in entries:
        for point in entry.latency:
            if not 0 < point.best_ms < np.inf:
                raise InvalidInputError("profile", point.best_ms, f"must be above 0 ms at {point.tokens} tokens")
    longest = max(point.tokens for entry in entries for point in entry.latency)
    texts = max(edges, default=longest)
    missing = [edge for edge in edges if edge not in {entry.tokens for entry in entries}]
    if "engines" in profile and missing and all(entry.tokens is not None for entry in entries):
        allowed = f"must be a length of the profile: {', '.join(map(str, lengths(profile)))}"
        raise InvalidInputError("bins", missing[0], allowed)
    return Manifest(
        *("profile", "", "", "emulated", "", ""),
        vocabulary=0,
        max_tokens=texts,
        packs_rows=packing,
        position_offset=0,
        reference="",
        tolerance="",
        hardware=str(profile.get("hardware", "")),
        outputs=(),
        files={},
        engines=tuple(entries),
    )


def lengths(profile: Mapping[str, Any]) -> list[int]:
    """The longest texts of its static engines, ascending. Raises InvalidInputError."""
    try:
        return sorted(int(one["tokens"]) for one in profile["engines"] if one["tokens"])
    except (KeyError, TypeError, ValueError):
        raise InvalidInputError("profile", sorted(profile), f"must hold {_STATED}") from None


def sidecar_profile(engines: Manifest) -> str:
    """The parameter `profile` of a front with these engines."""
    listed = [
        {"tokens": entry.tokens, "rows": entry.rows, "latency": [[p.tokens, p.median_ms] for p in entry.latency]}
        for entry in engines.engines
    ]
    return json.dumps({"engines": listed})


def _entry(engine: Mapping[str, Any], factor: float) -> EngineEntry:
    points = tuple(Latency(int(p[0]), 1, *(factor * float(ms) for ms in (p[1], p[2], p[3]))) for p in engine["latency"])
    rows = None if engine["rows"] is None else int(engine["rows"])
    return EngineEntry("", None if engine["tokens"] is None else int(engine["tokens"]), rows, 0.0, 1.0, points)


def _stated(
    lengths: Sequence[int], latency_ms: Sequence[float], edges: Sequence[int], dynamic: bool, packing: bool
) -> list[EngineEntry]:
    if (
        not lengths
        or len(lengths) != len(latency_ms)
        or any(b <= a for a, b in zip(lengths, lengths[1:], strict=False))
    ):
        raise InvalidInputError("profile", lengths, "must hold ascending lengths, and one of latency_ms for each")
    if edges and edges[-1] > lengths[-1]:
        raise InvalidInputError("bins", edges[-1], f"must be at most the longest length of the profile, {lengths[-1]}")
    values = np.interp(edges, lengths, latency_ms).tolist() if edges else []
    entries = [
        EngineEntry("", edge, row_slots(edge, packing, edges[-1]), 0.0, 1.0, (Latency(edge, 1, ms, ms, ms),))
        for edge, ms in zip(edges, values, strict=True)
    ]
    if dynamic or not edges:
        points = tuple(Latency(n, 1, ms, ms, ms) for n, ms in zip(lengths, latency_ms, strict=True))
        entries.insert(0, EngineEntry("", None, None, 0.0, 1.0, points))
    return entries


def front(
    parameters: Mapping[str, object], engines: Manifest, edges: Sequence[int], weights: Sequence[float], nodes: int = 1
) -> Front:
    """A front with these parameters, as the sidecar reads them from a generated config.pbtxt, on so many nodes.

    edges: longest texts of the bins; weights: share of the texts of each bin that the first plan assumes. Raises
    InvalidInputError naming a parameter.
    """
    workers = {name: parameters.get("workers", 2) for name in ("workers", "min_workers", "max_workers")}
    settings = read_front(
        NAME,
        {
            "bin_edges": json.dumps([*edges]),
            "plan_histogram": json.dumps([*weights]),
            "profile": sidecar_profile(engines),
            **{name: str(value) for name, value in {**workers, **parameters}.items()},
        },
    )
    if not settings.has_workers:
        return replace(settings, workers=settings.settings.engine_threads or cores())
    return replace(
        settings,
        models=tuple(qualified(f"node{number}" if nodes > 1 else "", NAME) for number in range(nodes)),
        workers=settings.workers * nodes,
        min_workers=settings.min_workers * nodes,
        max_workers=settings.max_workers * nodes,
    )


def weights(edges: Sequence[int], lengths: NDArray[np.int64]) -> list[float]:
    """The share of the texts of these lengths in each bin; longer ones count in the last. Without texts all alike."""
    bins = np.searchsorted(edges, lengths).clip(max=len(edges) - 1)
    counts = np.bincount(bins, minlength=len(edges)) if len(lengths) else np.ones(len(edges))
    return [float(share) for share in counts / counts.sum()]
