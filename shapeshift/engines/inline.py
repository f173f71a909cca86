"""A model's engines in this process: one engine thread a core, all engines of the model in each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from shapeshift.engines import ladder, registry
from shapeshift.engines.ladder import Ladder
from shapeshift.engines.loading import BackgroundLoader, first_and_rest
from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.engines.request import Row, TextRequest
from shapeshift.engines.share import rows_to_take
from shapeshift.errors import EngineError, OverloadedError
from shapeshift.serving.bounded_queue import BoundedQueue
from shapeshift.serving.log import Log
from shapeshift.serving.metrics import Counter, Gauge

_LOOK_S = 0.05


class PoolSettings(Protocol):
    """queue_rows, queue_tokens: most that may wait; pack_tokens: most in a call, 0: from the profile; memory_mb: while
    the process takes more, no further static engine is loaded."""

    @property
    def queue_rows(self) -> int: ...

    @property
    def queue_tokens(self) -> int: ...

    @property
    def pack_tokens(self) -> int: ...

    @property
    def memory_mb(self) -> int: ...


class EngineThread:
    """One thread with engines of its own; it decides what to take, runs it, and records the results."""

    def __init__(self, number: int, pool: InlinePool, engines: Ladder) -> None:
        self.engines = engines
        self.busy_rows = 0
        self.calls = 0
        self.rows = 0
        self._pool = pool
        self.thread = threading.Thread(target=self._serve, name=f"engine-{number}", daemon=True)

    def _serve(self) -> None:
        while rows := self._pool.queue.take(self._pool.decide):
            rows = [row for row in rows if row.request.still_wanted()]
            if rows:
                self._run(rows)

    def _run(self, rows: list[Row]) -> None:
        self.busy_rows = len(rows)
        before = time.perf_counter()
        try:
            outputs = self.engines.run([row.ids for row in rows])
        except Exception as error:  # noqa: BLE001  an engine that fails costs its rows, not the thread
            for row in rows:
                row.request.fail(EngineError(f"the engine failed: {error}"))
        else:
            took_ms = (time.perf_counter() - before) * 1e3
            for index, row in enumerate(rows):
                row.request.complete(row, {name: values[index] for name, values in outputs.items()}, took_ms)
        self.calls += 1
        self.rows += len(rows)
        self.busy_rows = 0


class InlinePool:
    """The engine threads of one model and the queue that they share.

    Ready with the engine for any shape (or, without one, the longest static engine); the other engines are
    loaded in the background, those that have seen the most requests first.
    """

    def __init__(self, manifest: Manifest, folder: Path, settings: PoolSettings, threads: int, log: Log) -> None:
        self.queue: BoundedQueue[Row] = BoundedQueue(settings.queue_rows, settings.queue_tokens)
        self.lengths_seen = [0] * (manifest.max_tokens + 1)
        wanted = settings.pack_tokens or ladder.efficient_tokens(manifest)
        self._pack_tokens = min(wanted, manifest.max_tokens)
        self._max_rows = ladder.max_rows(manifest)
        self._stopping = threading.Event()
        self._runtime = registry.provider(manifest.provider).open(folder, manifest.precision, threads=1)
        self.workers = [EngineThread(number, self, Ladder(manifest)) for number in range(threads)]
        first, rest = first_and_rest(manifest)
        self._load(first)
        for worker in self.workers:
            worker.thread.start()
        self._loader = BackgroundLoader(rest, self._load, self.lengths_seen, settings.memory_mb, log)
        self._deadlines = threading.Thread(target=self._watch_deadlines, name="deadlines", daemon=True)
        self._deadlines.start()

    @property
    def waiting(self) -> int:
        """Rows that wait for an engine thread."""
        return len(self.queue)

    @property
    def running(self) -> int:
        """Rows that engines compute at this moment."""
        return sum(worker.busy_rows for worker in self.workers)

    @property
    def loaded(self) -> int:
        """Engines that every thread has in use; the others are still being loaded, or could not be."""
        return min(len(worker.engines.loaded) for worker in self.workers)

    def metrics(self) -> list[Counter | Gauge]:
        """What is exported beside the front's own metrics."""
        workers = self.workers
        return [
            Gauge("engines_loaded", "Engines in use, of each engine thread", lambda: self.loaded),
            Counter("engine_calls_total", "Engine calls", read=lambda: sum(worker.calls for worker in workers)),
            Counter("engine_rows_total", "Texts computed", read=lambda: sum(worker.rows for worker in workers)),
        ]

    def submit(self, request: TextRequest) -> None:
        """Queue all rows of `request`; OverloadedError when they do not fit."""
        self.queue.put(request.rows)
        for row in request.rows:
            self.lengths_seen[row.tokens] += 1

    def decide(self, lengths: Iterable[int], waiting: int) -> int:
        """How many of the waiting rows the next engine call takes."""
        return rows_to_take(lengths, waiting, len(self.workers), self._pack_tokens, self._max_rows)

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until the background has loaded every engine; whether it has."""
        return self._loader.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer what waits with UNAVAILABLE, let running calls end, stop the threads."""
        self._stopping.set()
        for row in self.queue.close():
            row.request.fail(OverloadedError("the model is being unloaded; retry elsewhere"))
        for worker in self.workers:
            worker.thread.join(timeout_s)
        self._loader.close(timeout_s)
        self._deadlines.join(timeout_s)

    def _watch_deadlines(self) -> None:
        # A request whose time runs out behind a long queue is told so then, not when its turn comes.
        while not self._stopping.wait(_LOOK_S):
            for request in {row.request for row in self.queue.waiting() if row.request.has_deadline}:
                request.fail_if_late()

    def _load(self, entry: EngineEntry) -> None:
        for worker in self.workers:
            worker.engines.add(self._runtime.engine(entry.tokens, entry.rows), entry)
