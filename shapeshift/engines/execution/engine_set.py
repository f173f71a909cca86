"""The engines of one thread: a dynamic engine, and static engines that are loaded in the background."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np

from shapeshift.engines.hardware import resident_mb
from shapeshift.engines.interfaces import TOKEN_OUTPUTS, AdaptableEngine, Adapted, Array, Engine, Ids, ThreadedEngine
from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.errors import EngineError
from shapeshift.serving import events
from shapeshift.serving.metrics import Counter
from shapeshift.serving.model_args import Log

# The smallest pack whose time per token is within this factor of the best: a larger one only delays its rows.
_NEAR_BEST = 1.1
# The typical length, in tokens, of the short texts that packing is for.
_SHORT_ROW = 24
MAX_ROWS = 16
"""Of a pack that is no longer than the longest text may be."""
_ROW_TOKENS = 8
MOST_TOKENS = 16384
"""Of a pack."""
# Rows are numbered from 1.
_RANGE = np.arange(MOST_TOKENS + 1, dtype=np.int64)
# Of the thread that loads.
_NICENESS = 10


class EngineSet:
    """Runs each pack of rows on the engine that is fastest for its total length according to the profile.

    One thread uses it; another thread may call `add`.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._counted_from = manifest.position_offset, manifest.type_stride
        self._most_tokens = manifest.pack_tokens
        self._engines: dict[int | None, tuple[Engine, EngineEntry]] = {}
        self._threaded: list[ThreadedEngine] = []
        self._fastest: list[Engine | None] = [None] * (self._most_tokens + 1)
        self.calls: defaultdict[int | None, int] = defaultdict(int)
        self.call_s: defaultdict[int | None, float] = defaultdict(float)
        """Calls, and their seconds, by the tokens of the engine."""
        self.last_size = 0
        """Tokens of the engine that was called last; 0: of any size."""

    def add(self, engine: Engine, entry: EngineEntry) -> None:
        """Use `engine`, described by `entry`, from the next call on."""
        self._engines = {**self._engines, entry.tokens: (engine, entry)}
        self._threaded = [one for one, _ in self._engines.values() if isinstance(one, ThreadedEngine)]
        self._fastest = self._fastest_engines()

    @property
    def loaded(self) -> list[str]:
        """The names of the engines in use."""
        return [entry.name for _, entry in self._engines.values()]

    def choose(self, tokens: int, rows: int) -> Engine:
        """The engine for `rows` rows of `tokens` tokens in total. Raises EngineError if none is large enough."""
        engine = self._fastest[tokens] if tokens <= self._most_tokens else None
        if engine is None or (engine.rows is not None and engine.rows < rows):
            engine = self._smallest_fitting(tokens, rows)
        if engine is None:
            raise EngineError(f"no engine for {rows} rows of {tokens} tokens")
        return engine

    def warm_up(self) -> None:
        """Make the first call, which is slow: 70 ms where the next ones take 5 (OpenVINO, a dynamic engine)."""
        self.run([np.zeros(1, np.int64)])
        self.calls.clear()
        self.call_s.clear()

    def use(self, threads: int) -> int:
        """See `interfaces.ThreadedEngine`; returns how many are used: of other engines, 1. Any thread."""
        for engine in self._threaded:
            engine.use(threads)
        return threads if self._threaded else 1

    def run(self, texts: Sequence[Ids], adapted: Adapted | None = None) -> dict[str, Array]:
        """The outputs of one pack, each [len(texts), ...]; see `unpack`. adapted: of engines that have adapters."""
        tokens = sum(map(len, texts))
        engine = self.choose(tokens, len(texts))
        began = time.perf_counter()
        inputs = pack(texts, engine.tokens or tokens, engine.rows or len(texts), *self._counted_from)
        if adapted is None:
            outputs = unpack(engine.run(inputs), texts)
        else:
            outputs = unpack(cast(AdaptableEngine, engine).run_adapted(inputs, adapted), texts)
        took_s = time.perf_counter() - began
        self.calls[engine.tokens] += 1
        self.call_s[engine.tokens] += took_s
        self.last_size = engine.tokens or 0
        if events.is_recording():
            events.record(
                "pack",
                thread=threading.current_thread().name,
                size=engine.tokens or tokens,
                tokens=tokens,
                texts=[*map(len, texts)],
                ms=round(took_s * 1e3, 2),
            )
        return outputs

    def _fastest_engines(self) -> list[Engine | None]:
        costs = [(cost_curve(entry, self._most_tokens), engine) for engine, entry in self._engines.values()]
        table = np.stack([cost for cost, _ in costs])
        best = table.argmin(axis=0)
        return [
            costs[best[tokens]][1] if np.isfinite(table[best[tokens], tokens]) else None
            for tokens in range(self._most_tokens + 1)
        ]

    def _smallest_fitting(self, tokens: int, rows: int) -> Engine | None:
        fitting = [
            engine
            for engine, _ in self._engines.values()
            if (engine.tokens is None or engine.tokens >= tokens) and (engine.rows is None or engine.rows >= rows)
        ]
        return min(fitting, key=lambda engine: engine.tokens or self._most_tokens + 1, default=None)


def pack(
    texts: Sequence[Ids], tokens: int, rows: int, position_offset: int = 0, type_stride: int = 0
) -> dict[str, Array]:
    """The input tensors for `texts` (1-D id arrays, at most `rows` of them, at most `tokens` ids in total).

    Row i is segment i + 1. Positions count from `position_offset` in each row; see `_positions`.
    """
    ids = np.zeros((1, tokens), np.int64)
    segments = np.zeros((1, tokens), np.int64)
    positions = np.zeros((1, tokens), np.int64)
    start = 0
    for number, text in enumerate(texts, start=1):
        end = start + len(text)
        ids[0, start:end] = text
        segments[0, start:end] = number
        positions[0, start:end] = _positions(text, position_offset, type_stride)
        start = end
    return {"INPUT_IDS": ids, "SEGMENTS": segments, "POSITIONS": positions, "ROWS": _RANGE[1 : rows + 1]}


def _positions(text: Ids, offset: int, type_stride: int) -> Ids:
    """The positions of a text's tokens. Models that do not count from 0 count from the id of padding: where a text
    contains that token, it has the position before the first one, and the others are counted without it.
    """
    if offset:
        counted = (text % type_stride if type_stride else text) != offset - 1
        if not counted.all():
            return np.where(counted, np.cumsum(counted), 0) + (offset - 1)
    return _RANGE[: len(text)] + offset


def unpack(outputs: Mapping[str, Array], texts: Sequence[Ids]) -> dict[str, Array]:
    """The outputs of the pack of `texts` by text, copied: [texts, ...].

    Outputs with one entry per token become [texts, longest, ...], with zeros beyond a text's end.
    """
    return {
        name: _by_token(values[0], texts) if name in TOKEN_OUTPUTS else values[: len(texts)].copy()
        for name, values in outputs.items()
    }


def _by_token(values: Array, texts: Sequence[Ids]) -> Array:
    padded = np.zeros((len(texts), max(map(len, texts), default=0), *values.shape[1:]), values.dtype)
    start = 0
    for row, text in enumerate(texts):
        padded[row, : len(text)] = values[start : start + len(text)]
        start += len(text)
    return padded


class BackgroundLoader:
    """Loads the `pending` engines in its own thread, those whose lengths have the most requests first.

    start() is called before that. load(entry) loads an engine and starts using it. lengths_seen[n] counts texts of n
    tokens; the caller updates it.
    Loading stops once `used_mb` gives more than `memory_mb`. An engine that fails to load is logged and skipped:
    other engines serve its lengths. The thread yields the processor to those that serve.
    """

    def __init__(
        self,
        pending: list[EngineEntry],
        load: Callable[[EngineEntry], None],
        lengths_seen: list[int],
        memory_mb: int,
        log: Log,
        start: Callable[[], None] = lambda: None,
        used_mb: Callable[[], float] = resident_mb,
    ) -> None:
        self._start = start
        self._pending = list(pending)
        edges = [0, *(entry.tokens or 0 for entry in pending)]
        self._bins = {entry: (low, entry.tokens or 0) for low, entry in zip(edges, pending, strict=False)}
        self._load = load
        self._lengths_seen = lengths_seen
        self._memory_mb, self._used_mb = memory_mb, used_mb
        self._log = log
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the loader has finished. Returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop loading, and wait for the engine that is being loaded."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        # On Linux of this thread alone. Compiling engines takes seconds of the processors that serve meanwhile.
        os.nice(_NICENESS)
        self._start()
        pending = self._pending
        while pending and not self._stopping.is_set():
            if (used := self._used_mb()) > self._memory_mb:
                self._log(
                    f"memory_mb: {used:.0f} MiB used, limit {self._memory_mb}; {len(pending)} engines are not loaded"
                )
                return
            entry = max(pending, key=self._requests_of)
            pending.remove(entry)
            try:
                self._load(entry)
            except Exception as error:  # noqa: BLE001  other engines serve these lengths
                self._log(f"engine {entry.name} cannot be loaded, other engines serve its lengths: {error}")

    def _requests_of(self, entry: EngineEntry) -> int:
        low, high = self._bins[entry]
        return sum(self._lengths_seen[low + 1 : high + 1])


def work_metrics(manifest: Manifest, sets: Callable[[], Sequence[EngineSet]]) -> list[Counter]:
    """By engine, the calls of these sets and their seconds."""

    def counters(entry: EngineEntry) -> list[Counter]:
        engine = {"engine": entry.name}
        calls = partial(_total, sets, lambda one: one.calls[entry.tokens])
        seconds = partial(_total, sets, lambda one: one.call_s[entry.tokens])
        return [
            Counter("engine_used_total", "Engine calls, by engine", engine, calls),
            Counter("engine_seconds_total", "Time of engine calls, by engine", engine, seconds),
        ]

    return [counter for entry in manifest.engines for counter in counters(entry)]


def _total(sets: Callable[[], Sequence[EngineSet]], of_one: Callable[[EngineSet], float]) -> float:
    return sum(map(of_one, sets()))


def first_and_rest(manifest: Manifest) -> tuple[EngineEntry, list[EngineEntry]]:
    """The engine to start with (the dynamic one, or the longest), and the others, shortest first."""
    rest = list(manifest.engines)
    first = next((entry for entry in rest if entry.tokens is None), rest[-1])
    rest.remove(first)
    return first, rest


def cost_curve(entry: EngineEntry, max_tokens: int) -> Array:
    """Milliseconds of packs of 0..max_tokens tokens, [max_tokens + 1]; infinite beyond a static engine's length.

    Beyond its profile the engine of any shape takes as long for each token as at its end.
    """
    lengths = np.arange(max_tokens + 1)
    points = sorted((point.tokens, point.best_ms) for point in entry.latency)
    if entry.tokens is not None:
        return np.where(lengths <= entry.tokens, points[-1][1], np.inf)
    within = np.interp(lengths, [tokens for tokens, _ in points], [ms for _, ms in points])
    return np.asarray(within * np.maximum(1.0, lengths / points[-1][0]))


def best_curve(manifest: Manifest) -> Array:
    """As `cost_curve` up to the largest pack, on the engine that is fastest for each number of tokens."""
    return np.asarray(np.min([cost_curve(entry, manifest.pack_tokens) for entry in manifest.engines], axis=0))


def efficient_tokens(manifest: Manifest) -> int:
    """The size, in tokens, of the smallest pack whose time per token is within 10 % of the best.

    The last half of a short row is assumed to stay empty: rows are taken in order and do not fill a pack exactly.
    """
    points = [point for entry in manifest.engines for point in entry.latency if point.tokens > _SHORT_ROW]
    if not points:
        return manifest.pack_tokens
    times = {point: point.best_ms / (point.tokens - _SHORT_ROW / 2) for point in points}
    limit = min(times.values()) * _NEAR_BEST
    return min(point.tokens for point in points if times[point] <= limit)


def longest_call_s(manifest: Manifest) -> float:
    """The 99th percentile of the slowest profiled engine call, in seconds; 0 without a profile."""
    return max((point.p99_ms for entry in manifest.engines for point in entry.latency), default=0.0) / 1e3


def max_rows(manifest: Manifest) -> int:
    """The maximum number of rows in a pack; 1 if the model family cannot pack rows."""
    if not manifest.packs_rows:
        return 1
    return max(entry.rows or MAX_ROWS for entry in manifest.engines)


def row_slots(tokens: int, packs_rows: bool, max_tokens: int) -> int:
    """The number of row slots of a static engine of `tokens` tokens. An unused slot costs almost nothing.

    max_tokens: of a text. A longer engine has so many slots that texts rarely need one that is longer still, which
    would cost more than what was predicted from their tokens.
    """
    if not packs_rows:
        return 1
    return tokens // _ROW_TOKENS if tokens > max_tokens else max(1, min(MAX_ROWS, tokens // 4))
