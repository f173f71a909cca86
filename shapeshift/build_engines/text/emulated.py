"""Builds emulated engines (see `shapeshift.engines.providers.emulated`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shapeshift.build_engines.text import edges
from shapeshift.build_engines.text.config import read_json
from shapeshift.build_engines.text.edges import Curves
from shapeshift.build_engines.text.engines import BuildResult, dynamic_lengths
from shapeshift.build_engines.text.plan import Plan, engine_outputs
from shapeshift.engines.execution.engine_set import row_slots
from shapeshift.engines.manifest import EngineEntry, Latency
from shapeshift.engines.providers.emulated import FILE_NAME, PROVIDER
from shapeshift.engines.text.families import hidden_size, vocabulary_size
from shapeshift.errors import InvalidInputError


def build_emulated(planned: Plan, work: Path) -> BuildResult:
    """Write the description of the emulated engines into `work`."""
    front, settings = planned.front, planned.front.settings
    if not settings.profile_file:
        raise InvalidInputError("profile_file", "", "an emulated model needs a measured profile")
    spec = read_json(front.folder / settings.profile_file, "profile_file")
    try:
        lengths, medians = list(map(int, spec["lengths"])), list(map(float, spec["latency_ms"]))
    except (KeyError, TypeError, ValueError):
        raise InvalidInputError("profile_file", settings.profile_file, "lengths and latency_ms") from None
    outputs = engine_outputs(planned, hidden_size(planned.checkpoint.config))
    widths = {name: dims[-1] for name, dims in outputs.items()}
    PROVIDER.describe(work, lengths, medians, widths, settings.time_scale)

    def points(at: Sequence[int]) -> tuple[Latency, ...]:
        values = np.interp(at, lengths, medians) * settings.time_scale
        return tuple(Latency(n, 1, float(ms), float(ms), float(ms)) for n, ms in zip(at, values, strict=True))

    def entry(tokens: int | None, at: Sequence[int]) -> EngineEntry:
        slots = None if tokens is None else row_slots(tokens, settings.packing)
        return EngineEntry(FILE_NAME, tokens, slots, 0.0, 1.0, points(at))

    def curves(at: Sequence[int]) -> Curves:
        values = [point.best_ms for point in points(at)]
        return Curves(list(at), values, None)

    entries = [entry(tokens, [tokens]) for tokens in edges.choose_edges(front, curves)]
    if settings.dynamic:
        entries.insert(0, entry(None, dynamic_lengths(settings.max_tokens)))
    vocabulary = vocabulary_size(planned.checkpoint.config)
    return BuildResult(tuple(entries), outputs, vocabulary, settings.packing, 0)
