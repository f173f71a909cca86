"""Proof that each working thread of a process goes on: the heartbeat proves the metrics thread alone.

A working thread counts its steps. A thread that has work and does no step for too long hangs, or has ended. The metrics
thread notices it, logs where the thread is, and exports it; the sidecar then replaces the process.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shapeshift.serving.metrics import Gauges
from shapeshift.serving.model_args import Log

_MIN_LIMIT_S = 5.0
_LIMIT_STEPS = 10.0
# Of a longer pause between two checks no more counts: the whole process was suspended or had no processor, its threads
# did not hang.
_MAX_CHECK_S = 1.0
_LOGGED_FRAMES = 4


class StepCounter:
    """The steps of one working thread, or of several that share their work; one at a time calls `step` or `running`.

    name: label of the metric. has_work(): whether work waits for the thread; the metrics thread calls it.
    longest_step_s: the longest profiled step, in seconds; 0 where steps are short.
    """

    def __init__(self, name: str, has_work: Callable[[], bool], longest_step_s: float = 0.0) -> None:
        self.name = name
        self.limit_s = max(_MIN_LIMIT_S, _LIMIT_STEPS * longest_step_s)
        self.steps = 0
        self._has_work = has_work
        self._running_on: int | None = None
        self._native_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a step runs or work waits for one."""
        return self._running_on is not None or self._has_work()

    def step(self) -> None:
        """Count a step."""
        self.steps += 1

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The block is one step."""
        self._native_id = threading.get_native_id()
        self._running_on = threading.get_ident()
        try:
            yield
        finally:
            self._running_on = None
            self.step()

    def queued_s(self) -> float:
        """Seconds that the thread of the running step has waited for a processor, in its life; 0 where unknown."""
        if self._running_on is None:
            return 0.0
        try:
            return int(Path(f"/proc/self/task/{self._native_id}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def position(self) -> str:
        """Where the running step is, innermost call last; empty if none runs."""
        frame = sys._current_frames().get(self._running_on or 0)
        frames = traceback.extract_stack(frame, _LOGGED_FRAMES) if frame is not None else []
        return ", ".join(f"{entry.name} ({entry.filename}:{entry.lineno})" for entry in frames)


class Liveness:
    """Finds the working threads of a process that do no step. Only the metrics thread calls `stalled`.

    counters(): those of the threads that exist now; no two of them have one name. clock(): monotonic seconds.
    """

    def __init__(
        self, counters: Callable[[], Iterable[StepCounter]], log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.metric = Gauges(
            "thread_stalled_seconds",
            "Time without a step of a thread that has work; 0 up to its limit",
            "thread",
            self.stalled,
            self._newly_stalled,
        )
        self._counters = counters
        self._log = log
        self._clock = clock
        self._checked_at = clock()
        # Of threads that had work at the last check: their steps by then, for how long they had done none, and
        # `queued_s`. A thread without a processor does not hang: a new process would have none either.
        self._waits: dict[StepCounter, tuple[int, float, float]] = {}
        self._stalled: dict[str, float] = {}

    @property
    def is_stalled(self) -> bool:
        """Whether a thread was stalled at the last check. Called on any thread."""
        return any(self._stalled.values())

    def stalled(self) -> dict[str, float]:
        """By thread: seconds without a step although it has work, where above its limit; else 0."""
        now = self._clock()
        elapsed = min(now - self._checked_at, _MAX_CHECK_S)
        self._checked_at = now
        before, self._waits = self._waits, {}
        seconds = {}
        for counter in self._counters():
            seconds[counter.name] = 0.0
            if not counter.has_work:
                continue
            queued_s = counter.queued_s()
            steps, waited_s, queued_before_s = before.get(counter, (-1, 0.0, queued_s))
            own_s = max(0.0, elapsed - max(0.0, queued_s - queued_before_s))
            now_s = waited_s + own_s if counter.steps == steps else 0.0
            self._waits[counter] = counter.steps, now_s, queued_s
            if now_s > counter.limit_s:
                seconds[counter.name] = now_s
                if waited_s <= counter.limit_s:
                    where = counter.position() or "it runs nothing"
                    self._log(f"thread {counter.name} has work and has done no step for {now_s:.0f} s: {where}")
        self._stalled = seconds
        return seconds

    def _newly_stalled(self) -> bool:
        before = {name for name, seconds in self._stalled.items() if seconds}
        return any(seconds and name not in before for name, seconds in self.stalled().items())
