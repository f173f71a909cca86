"""Runs a model's engines in this process: each engine thread has all engines of the model; all share one queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shapeshift.engines.execution import engine_set
from shapeshift.engines.execution.engine_set import BackgroundLoader, EngineSet, first_and_rest
from shapeshift.engines.execution.request import BoundedQueue, Row, TextRequest, trace_call
from shapeshift.engines.hardware import cores
from shapeshift.engines.interfaces import PROVIDERS, Adapted
from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.engines.policy.packs import CoreShares, MeasuredFactor, row_costs, rows_to_take
from shapeshift.errors import EngineError
from shapeshift.loops import Loop
from shapeshift.serving.bounds import SloClasses, TimeBound, classes_of, unloading
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Counter, Gauge, Gauges
from shapeshift.serving.model_args import FrontSettings, Log
from shapeshift.settings import require

_DEADLINE_CHECK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class ExecutorSettings(FrontSettings):
    """Parameters of a process that runs text engines.

    engine_threads  threads that run engines, one core each; 0: one for each core; on a GPU there is one; a call
                    of provider native takes idle ones, too
    queue_rows      most texts that may wait; a request that does not fit is answered UNAVAILABLE
    max_queue_ms    most milliseconds until a text that arrives while others wait is computed, as predicted from the
                    profile; a request that would take longer is refused on arrival; 0: any
    pack_tokens     most tokens of texts that share one engine call; 0: from the profile
    slo_classes     values of the request parameter slo_class, the most urgent first; *: all others, and none
    memory_mb       MiB; while the process, or on a GPU its engines there, take more, no further static engine is
                    loaded
    """

    engine_threads: int = 0
    queue_rows: int = 4096
    max_queue_ms: float = 30_000.0
    pack_tokens: int = 0
    slo_classes: str = "interactive,*,batch"
    memory_mb: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        classes_of(self.slo_classes)
        require(0 <= self.engine_threads <= 256, "engine_threads", self.engine_threads, "0 to 256")
        for name in ("queue_rows", "memory_mb"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("max_queue_ms", "pack_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")


class EngineThread:
    """One thread with its own engines. It takes rows from the queue, runs them and records the results.

    engines: set by `serve`, before which it waits.
    """

    engines: EngineSet

    def __init__(self, number: int, executor: EngineExecutor, longest_step_s: float) -> None:
        self.steps = StepCounter(f"engine-{number}", lambda: executor.waiting > 0, longest_step_s)
        self.busy_rows = 0
        # What its running call takes by the profile.
        self.busy_ms = 0.0
        # Of its running call, now.
        self.cores = 1
        self.calls = 0
        self.rows = 0
        self._executor = executor
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run_packs, name=f"engine-{number}", daemon=True)
        self._thread.start()

    def serve(self, engines: EngineSet) -> None:
        """Start taking rows."""
        self.engines = engines
        self._serves.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, which it does once the queue is closed, also if it never served."""
        self._serves.set()
        self._thread.join(timeout_s)

    def _run_packs(self) -> None:
        self._serves.wait()
        while rows := self._executor.queue.take(self._executor.rows_to_take):
            with self.steps.running():
                rows = [row for row in rows if row.request.should_run()]
                if rows:
                    self._run(rows)

    def _run(self, rows: list[Row]) -> None:
        executor, began, before = self._executor, time.monotonic(), time.perf_counter()
        profiled_ms = executor.pack_ms(sum(row.tokens for row in rows))
        self.busy_rows, self.busy_ms = len(rows), profiled_ms
        cores_used = executor.share_cores(self)
        try:
            try:
                outputs = self.engines.run([row.ids for row in rows], executor.adapted(rows))
            finally:
                # Before the answers: what comes upon them finds this thread idle.
                self.busy_rows, self.busy_ms = 0, 0.0
                self.calls += 1
                self.rows += len(rows)
        except Exception as error:  # noqa: BLE001  a failing engine fails its rows, not the thread
            for row in rows:
                row.request.fail(EngineError(f"the engine failed: {error}"))
            return
        took_ms, size = (time.perf_counter() - before) * 1e3, self.engines.last_size
        trace_call(rows, began, {"size": size, "predicted_ms": profiled_ms})
        for index, row in enumerate(rows):
            row.request.complete(row, {name: values[index] for name, values in outputs.items()}, took_ms, size)
        if cores_used == 1:
            executor.observe(profiled_ms, (time.perf_counter() - before) * 1e3)
        elif self.cores == cores_used:
            executor.observe_shared(profiled_ms, took_ms)


class EngineExecutor:
    """The engine threads of one model and their shared queue.

    The constructor loads the dynamic engine (or, without one, the longest static engine) for the first thread. In the
    background the other threads get it and serve, then all threads get the other engines, those with the most requests
    first.
    """

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        settings: ExecutorSettings,
        log: Log,
        device: int | None = None,
        adapted: Callable[[Sequence[Row]], Adapted | None] = lambda rows: None,
    ) -> None:
        """adapted: what the adapters of a pack's requests change, of engines that are `AdaptableEngine`."""
        self.adapted = adapted
        self.lengths_seen = [0] * (manifest.max_tokens + 1)
        pack_tokens = settings.pack_tokens or engine_set.efficient_tokens(manifest)
        self._pack_tokens = min(pack_tokens, manifest.pack_tokens)
        self._max_rows = engine_set.max_rows(manifest)
        self._pack_ms = engine_set.best_curve(manifest).tolist()
        self._row_ms = row_costs(self._pack_ms, self._pack_tokens, self._max_rows)
        self._measured = MeasuredFactor()
        self.time_bound = TimeBound("max_queue_ms", settings.max_queue_ms)
        self.queue = BoundedQueue(settings.queue_rows, self.row_ms, SloClasses(classes_of(settings.slo_classes)))
        self._stopping = threading.Event()
        self._runtime = PROVIDERS[manifest.provider].open(folder, manifest.precision, 1, device)
        self._manifest = manifest
        self._log = log
        # A GPU has one: the graphs of its engines share memory.
        threads = settings.engine_threads or cores() if device is None else 1
        first, rest = first_and_rest(manifest)
        engines = self._engines_with(first)
        longest_s = engine_set.longest_call_s(manifest)
        self._core_shares = CoreShares(threads)
        # Those that serve. All are made here: a thread inherits the niceness of the one that makes it.
        self.threads: list[EngineThread] = []
        self._all_threads = [EngineThread(number, self, longest_s) for number in range(threads)]
        self._started = threading.Event()
        self._let_serve(self._all_threads[0], engines)
        start_others = partial(self._start_others, first)
        self._loader = BackgroundLoader(
            rest, self._load, self.lengths_seen, settings.memory_mb, log, start_others, self._runtime.used_mb
        )
        self._deadlines = Loop("deadlines", self._fail_late_requests, log)
        self._deadlines.start()

    @property
    def waiting(self) -> int:
        """The number of rows in the queue."""
        return len(self.queue)

    @property
    def running(self) -> int:
        """The number of rows that engines are computing."""
        return sum(thread.busy_rows for thread in self.threads)

    @property
    def loaded(self) -> int:
        """The number of engines that every thread has loaded; 0 while threads are still to start."""
        return min(len(thread.engines.loaded) for thread in self.threads) if self._started.is_set() else 0

    @property
    def steps(self) -> list[StepCounter]:
        """The steps of the engine threads that run by now: engine calls."""
        return [thread.steps for thread in self.threads]

    def metrics(self) -> list[Counter | Gauge | Gauges]:
        """The executor's metrics, exported with those of the front."""
        threads = self.threads
        return [
            Gauge("engines_loaded", "Engines in use, of each engine thread", lambda: self.loaded),
            Counter("engine_calls_total", "Engine calls", read=lambda: sum(thread.calls for thread in threads)),
            Counter("engine_rows_total", "Texts computed", read=lambda: sum(thread.rows for thread in threads)),
            *self.queue.classes.metrics(),
            *engine_set.work_metrics(self._manifest, lambda: [thread.engines for thread in self.threads]),
        ]

    def require_room(self, latency_ms: float | None, slo_class: str | None = None) -> None:
        """Raise OverloadedError where what waits and runs already takes too long for such a request.

        Reading texts takes most of the time of a refusal. `submit` counts what the texts themselves cost.
        """
        if len(self.queue):
            self.time_bound.require(self.predicted_ms((), slo_class), latency_ms)

    def submit(self, request: TextRequest) -> None:
        """Queue all rows of `request`. Raises OverloadedError if they do not fit, or would be answered too late.

        An empty queue takes any request: its prediction could be wrong, and no call would correct it.
        """
        if len(self.queue):
            request.require_in_time(self.predicted_ms(request.rows, request.slo_class), self.time_bound)
        self.queue.put(request.rows)
        for row in request.rows:
            self.lengths_seen[row.tokens] += 1

    def predicted_ms(self, rows: Sequence[Row], slo_class: str | None = None) -> float:
        """The time after which `rows` of that class, queued now, would be computed.

        By the profile, corrected by recent calls.
        """
        before = self.queue.ms_before(slo_class) + sum(thread.busy_ms for thread in self.threads)
        costs_ms = [self.row_ms(row) for row in rows]
        threads = len(self.threads)
        return self._measured.value * (before / threads + max(sum(costs_ms) / threads, max(costs_ms, default=0.0)))

    def row_ms(self, row: Row) -> float:
        """What a row costs by the profile."""
        return self._row_ms[row.tokens]

    def pack_ms(self, tokens: int) -> float:
        """What a call costs by the profile."""
        return float(self._pack_ms[tokens])

    def observe(self, profiled_ms: float, took_ms: float) -> None:
        """Record how long a thread was busy with a call on one core, as in the profile."""
        self._measured.observe(took_ms, profiled_ms)

    def observe_shared(self, profiled_ms: float, took_ms: float) -> None:
        """Record how long a call took that kept several cores."""
        self._core_shares.observe(took_ms, self._measured.value * profiled_ms, time.monotonic())

    def share_cores(self, beginning: EngineThread) -> int:
        """Let the call that begins on this busy thread, and those that run, have equal shares of the threads' cores.

        Returns how many the call uses.
        """
        busy = [thread for thread in self.threads if thread.busy_rows]
        each = self._core_shares.each(len(busy) + len(self.queue), time.monotonic())
        for thread in busy:
            # What a running call has given up does not come back.
            most = each if thread is beginning else thread.cores
            thread.cores = min(most, thread.engines.use(each))
        return beginning.cores

    def rows_to_take(self, lengths: Iterable[int], waiting: int) -> int:
        """The number of waiting rows that the next engine call takes."""
        return rows_to_take(lengths, waiting, len(self.threads), self._pack_tokens, self._max_rows)

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until the background loader has finished. Returns whether it has."""
        return self._loader.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail waiting rows with OverloadedError, let running calls finish, and stop the threads."""
        self._stopping.set()
        for row in self.queue.close():
            row.request.fail(unloading())
        for thread in self._all_threads:
            thread.join(timeout_s)
        self._loader.close(timeout_s)
        self._deadlines.stop(timeout_s)

    def _fail_late_requests(self) -> float:
        # A request whose deadline expires in a long queue fails at once, not when its turn comes.
        for request in {row.request for row in self.queue.waiting() if row.request.latency_ms is not None}:
            request.fail_if_late()
        return _DEADLINE_CHECK_S

    def _engines_with(self, first: EngineEntry) -> EngineSet:
        engines = EngineSet(self._manifest)
        engines.add(self._runtime.engine(first.tokens, first.rows), first)
        engines.warm_up()
        return engines

    def _let_serve(self, thread: EngineThread, engines: EngineSet) -> None:
        thread.serve(engines)
        self.threads.append(thread)

    def _start_others(self, first: EngineEntry) -> None:
        try:
            for thread in self._all_threads[1:]:
                if not self._stopping.is_set():
                    self._let_serve(thread, self._engines_with(first))
        except Exception as error:  # noqa: BLE001  the threads that run serve all requests
            self._log(f"engine thread {len(self.threads)} cannot be started, {len(self.threads)} serve: {error}")
        self._started.set()

    def _load(self, entry: EngineEntry) -> None:
        for thread in self.threads:
            thread.engines.add(self._runtime.engine(entry.tokens, entry.rows), entry)
