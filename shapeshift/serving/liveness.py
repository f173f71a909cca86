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
        self._running_on = threading.get_ident()
        try:
            yield
        finally:
            self._running_on = None
            self.step()

    def position(self) -> str:
        """Where the running step is, innermost call last; empty if none runs."""
        frame = sys._current_frames().get(self._running_on or 0)
        found = traceback.extract_stack(frame, _LOGGED_FRAMES) if frame is not None else []
        return ", ".join(f"{entry.name} ({entry.filename}:{entry.lineno})" for entry in found)


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
        # Of threads that had work at the last check: their steps by then, and for how long they had done none.
        self._waits: dict[StepCounter, tuple[int, float]] = {}
        self._found: dict[str, float] = {}

    def stalled(self) -> dict[str, float]:
        """By thread: seconds without a step although it has work, where above its limit; else 0."""
        now = self._clock()
        elapsed = min(now - self._checked_at, _MAX_CHECK_S)
        self._checked_at = now
        before, self._waits = self._waits, {}
        found = {}
        for counter in self._counters():
            found[counter.name] = 0.0
            if not counter.has_work:
                continue
            steps, waited_s = before.get(counter, (-1, 0.0))
            now_s = waited_s + elapsed if counter.steps == steps else 0.0
            self._waits[counter] = counter.steps, now_s
            if now_s > counter.limit_s:
                found[counter.name] = now_s
                if waited_s <= counter.limit_s:
                    where = counter.position() or "it runs nothing"
                    self._log(f"thread {counter.name} has work and has done no step for {now_s:.0f} s: {where}")
        self._found = found
        return found

    def _newly_stalled(self) -> bool:
        known = {name for name, seconds in self._found.items() if seconds}
        return any(seconds and name not in known for name, seconds in self.stalled().items())
