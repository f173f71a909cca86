"""Placement `inline`: one process, one engine thread a core, all engines of the model in each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from shapeshift.engines import ladder, registry
from shapeshift.engines.hardware import resident_mb
from shapeshift.engines.ladder import Ladder
from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.errors import EngineError, OverloadedError
from shapeshift.polymorph.request import Row, TextRequest
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.polymorph.share import rows_to_take
from shapeshift.serving.bounded_queue import BoundedQueue

Log = Callable[[str], None]
_LOOK_S = 0.05


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
            rows = [row for row in rows if _still_wanted(row.request)]
            if rows:
                self._run(rows)

    def _run(self, rows: list[Row]) -> None:
        self.busy_rows = len(rows)
        try:
            outputs = self.engines.run([row.ids for row in rows])
        except Exception as error:  # noqa: BLE001  an engine that fails costs its rows, not the thread
            for row in rows:
                row.request.fail(EngineError(f"the engine failed: {error}"))
        else:
            for index, row in enumerate(rows):
                row.request.complete(row, {name: values[index] for name, values in outputs.items()})
        self.calls += 1
        self.rows += len(rows)
        self.busy_rows = 0


class InlinePool:
    """The engine threads of one model and the queue that they share.

    Ready with the engine for any shape (or, without one, the longest static engine); the other engines are
    loaded in the background, those that have seen the most requests first.
    """

    def __init__(self, manifest: Manifest, folder: Path, settings: PolymorphSettings, threads: int, log: Log) -> None:
        self.queue: BoundedQueue[Row] = BoundedQueue(settings.queue_rows, settings.queue_tokens)
        self.lengths_seen = [0] * (manifest.max_tokens + 1)
        wanted = settings.pack_tokens or ladder.efficient_tokens(manifest)
        self._pack_tokens = min(wanted, manifest.max_tokens)
        self._max_rows = ladder.max_rows(manifest)
        self._log = log
        self._stopping = threading.Event()
        self._runtime = registry.provider(manifest.provider).open(folder, manifest.precision, threads=1)
        self.workers = [EngineThread(number, self, Ladder(manifest)) for number in range(threads)]
        waiting = list(manifest.engines)
        first = next((entry for entry in waiting if entry.tokens is None), waiting[-1])
        waiting.remove(first)
        self._load(first)
        for worker in self.workers:
            worker.thread.start()
        self._memory_mb = settings.memory_mb
        self._loader = threading.Thread(target=self._load_rest, args=(waiting,), name="loader", daemon=True)
        self._loader.start()
        self._deadlines = threading.Thread(target=self._watch_deadlines, name="deadlines", daemon=True)
        self._deadlines.start()

    @property
    def running(self) -> int:
        """Rows that engines compute at this moment."""
        return sum(worker.busy_rows for worker in self.workers)

    @property
    def loaded(self) -> int:
        """Engines that every thread has in use; the others are still being loaded, or could not be."""
        return min(len(worker.engines.loaded) for worker in self.workers)

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
        self._loader.join(timeout_s)
        return not self._loader.is_alive()

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer what waits with UNAVAILABLE, let running calls end, stop the threads."""
        self._stopping.set()
        for row in self.queue.close():
            row.request.fail(OverloadedError("the model is being unloaded; retry elsewhere"))
        for worker in self.workers:
            worker.thread.join(timeout_s)
        self._loader.join(timeout_s)
        self._deadlines.join(timeout_s)

    def _watch_deadlines(self) -> None:
        # A request whose time runs out behind a long queue is told so then, not when its turn comes.
        while not self._stopping.wait(_LOOK_S):
            for request in {row.request for row in self.queue.waiting() if row.request.has_deadline}:
                request.fail_if_late()

    def _load(self, entry: EngineEntry) -> None:
        for worker in self.workers:
            worker.engines.add(self._runtime.engine(entry.tokens, entry.rows), entry)

    def _load_rest(self, waiting: list[EngineEntry]) -> None:
        edges = [0, *(entry.tokens or 0 for entry in waiting)]
        bins = {entry: (low, entry.tokens or 0) for low, entry in zip(edges, waiting, strict=False)}
        while waiting and not self._stopping.is_set():
            if (held := resident_mb()) > self._memory_mb:
                self._log(f"{held:.0f} MiB held, memory_mb is {self._memory_mb}: {len(waiting)} engines stay unloaded")
                return
            entry = max(waiting, key=lambda entry: self._seen(*bins[entry]))
            waiting.remove(entry)
            try:
                self._load(entry)
            except Exception as error:  # noqa: BLE001  the other engines serve these lengths
                self._log(f"engine {entry.name} could not be loaded, others take its lengths: {error}")

    def _seen(self, low: int, high: int) -> int:
        return sum(self.lengths_seen[low + 1 : high + 1])


def _still_wanted(request: TextRequest) -> bool:
    request.fail_if_late()
    if not request.ended:
        request.fail_if_abandoned()
    return not request.ended
