"""The engines of one thread: an engine for any shape and static ones that may arrive while it serves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.engines.packing import pack, unpack
from shapeshift.engines.protocol import Array, Engine, Ids
from shapeshift.errors import EngineError

# A pack larger than needed to come this near the best time per token would only make its rows wait.
_NEAR_BEST = 1.1
# Packing is for short texts; this is a typical one's length in tokens.
_SHORT_ROW = 24


class Ladder:
    """Runs packs of rows, each on the engine that the profile says is fastest for its total length.

    Used by one thread; `add` may be called by another.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._offset = manifest.position_offset
        self._max_tokens = manifest.max_tokens
        self._engines: dict[int | None, tuple[Engine, EngineEntry]] = {}
        self._choice: list[Engine | None] = [None] * (self._max_tokens + 1)

    def add(self, engine: Engine, entry: EngineEntry) -> None:
        """Take `engine`, made from `entry`, into use from the next call on."""
        self._engines = {**self._engines, entry.tokens: (engine, entry)}
        self._choice = self._choose_all()

    @property
    def loaded(self) -> list[str]:
        """Names of the engines in use."""
        return [entry.name for _, entry in self._engines.values()]

    def choose(self, tokens: int, rows: int) -> Engine:
        """The engine for `rows` rows of `tokens` tokens in all; EngineError where none is large enough."""
        engine = self._choice[tokens] if tokens <= self._max_tokens else None
        if engine is None or (engine.rows is not None and engine.rows < rows):
            engine = self._with_rows(tokens, rows)
        if engine is None:
            raise EngineError(f"no engine for {rows} rows of {tokens} tokens")
        return engine

    def run(self, texts: Sequence[Ids]) -> dict[str, Array]:
        """Outputs of one pack, each [len(texts), ...], copied; see `packing.unpack`."""
        tokens = sum(map(len, texts))
        engine = self.choose(tokens, len(texts))
        inputs = pack(texts, engine.tokens or tokens, engine.rows or len(texts), self._offset)
        return unpack(engine.run(inputs), texts)

    def _choose_all(self) -> list[Engine | None]:
        costs = [(cost_curve(entry, self._max_tokens), engine) for engine, entry in self._engines.values()]
        table = np.stack([cost for cost, _ in costs])
        best = table.argmin(axis=0)
        return [
            costs[best[tokens]][1] if np.isfinite(table[best[tokens], tokens]) else None
            for tokens in range(self._max_tokens + 1)
        ]

    def _with_rows(self, tokens: int, rows: int) -> Engine | None:
        fitting = [
            engine
            for engine, _ in self._engines.values()
            if (engine.tokens is None or engine.tokens >= tokens) and (engine.rows is None or engine.rows >= rows)
        ]
        return min(fitting, key=lambda engine: engine.tokens or self._max_tokens + 1, default=None)


def cost_curve(entry: EngineEntry, max_tokens: int) -> Array:
    """Milliseconds for packs of 0..max_tokens tokens; infinite beyond a static engine's length."""
    lengths = np.arange(max_tokens + 1)
    points = sorted((point.tokens, point.best_ms) for point in entry.latency)
    if entry.tokens is not None:
        return np.where(lengths <= entry.tokens, points[-1][1], np.inf)
    return np.asarray(np.interp(lengths, [tokens for tokens, _ in points], [ms for _, ms in points]))


def efficient_tokens(manifest: Manifest) -> int:
    """The smallest pack whose time per token, as filled in practice, comes within a tenth of the best pack's.

    A pack that takes rows in order ends, on average, half a row short of its size.
    """
    points = [point for entry in manifest.engines for point in entry.latency if point.tokens > _SHORT_ROW]
    if not points:
        return manifest.max_tokens
    times = {point: point.best_ms / (point.tokens - _SHORT_ROW / 2) for point in points}
    enough = min(times.values()) * _NEAR_BEST
    return min(point.tokens for point in points if times[point] <= enough)


def max_rows(manifest: Manifest) -> int:
    """How many rows a pack may have: 1 where the family's rows cannot share a sequence."""
    if not manifest.packs_rows:
        return 1
    return min(MAX_ROWS, max(entry.rows or MAX_ROWS for entry in manifest.engines))


MAX_ROWS = 16


def rows_of(tokens: int, packs_rows: bool) -> int:
    """The row slots of a static engine of `tokens` tokens: a pooled row costs little, an unused slot less."""
    return max(1, min(MAX_ROWS, tokens // 4)) if packs_rows else 1
