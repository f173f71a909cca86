"""Threads for calls that may never return.

A call cannot be taken back (Triton 24.10). A call that is late is abandoned: its thread is lost until the call returns,
and a new thread takes its place.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shapeshift.errors import ShapeshiftError
from shapeshift.serving.bounds import unloading

T = TypeVar("T")
_WATCH_S = 0.02


class CallTimeoutError(ShapeshiftError):
    """The call did not return before its deadline. started: whether it was running, and is now abandoned."""

    def __init__(self, text: str, started: bool) -> None:
        super().__init__(text)
        self.started = started


@dataclass(eq=False)
class _Call:
    """ended: its outcome is decided; set once, by the first of its thread, the watching thread and `close`."""

    key: str
    run: Callable[[], Any]
    done: Callable[[Any], None]
    deadline: float
    ended: bool = False


class CallPool:
    """Runs calls that may never return, on at most `threads` threads at a time; abandons those that are late.

    Threads start when they are needed. name: of the threads; standstill_s: after a longer pause of the process (a
    suspended machine) all deadlines move by the pause.
    """

    def __init__(self, name: str, threads: int, standstill_s: float = math.inf) -> None:
        self._name = name
        self._max_threads = threads
        self._standstill_s = standstill_s
        self._lock = threading.Lock()
        self._call_waits = threading.Condition(self._lock)
        self._call_exists = threading.Condition(self._lock)
        self._all_ended = threading.Condition(self._lock)
        self._waiting: deque[_Call] = deque()
        # A call stays here until its `done` has returned, unless it is abandoned.
        self._running: set[_Call] = set()
        self._abandoned: Counter[str] = Counter()
        self._timeouts = 0
        # Threads that are not lost to an abandoned call, and those of them that wait for a call.
        self._threads, self._idle = 0, 0
        self._watcher: threading.Thread | None = None
        self._closing = False

    @property
    def waiting(self) -> int:
        """Calls that no thread has begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Calls that run, abandoned ones excluded."""
        return len(self._running)

    @property
    def timeouts(self) -> int:
        """Calls that were abandoned at their deadline, in all."""
        return self._timeouts

    def abandoned(self, key: str = "") -> int:
        """Abandoned calls of `key` (of all keys by default) that have not returned yet."""
        with self._lock:
            return self._abandoned[key] if key else self._abandoned.total()

    def submit(self, key: str, run: Callable[[], T], done: Callable[[T | Exception], None], deadline: float) -> None:
        """Run `run()` on a thread of the pool.

        key: the callee, for example a model. deadline: monotonic seconds. `done` is called exactly once, without a
        lock: with the result or the error of `run` on a thread of the pool, or with CallTimeoutError on the watching
        thread once the deadline has passed, whether the call waits or runs.
        Raises OverloadedError where the pool is closed; `done` is not called then.
        """
        with self._lock:
            if self._closing:
                raise unloading()
            self._waiting.append(_Call(key, run, done, deadline))
            self._start_threads(len(self._waiting))
            self._call_waits.notify()
            self._call_exists.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """End what waits with OverloadedError, and with CallTimeoutError what still runs at the last deadline.

        timeout_s: waits no longer, even if a deadline is later.
        """
        with self._lock:
            self._closing = True
            unstarted = list(self._waiting)
            self._waiting.clear()
            self._call_waits.notify_all()
            self._call_exists.notify_all()
        for call in unstarted:
            _tell(call, unloading())
        with self._lock:
            last_s = max((call.deadline for call in self._running), default=0.0) - time.monotonic()
            self._all_ended.wait_for(lambda: not self._running, min(timeout_s, max(last_s, 0.0)))
            stuck = [call for call in self._running if not call.ended]
            self._abandon(stuck)
            watcher = self._watcher
        for call in stuck:
            _tell(call, CallTimeoutError(f"{call.key}: no answer before the model was unloaded", started=True))
        # It may be about to report a call that it has abandoned.
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(timeout_s)

    def _start_threads(self, calls: int) -> None:
        """Under the lock: make the threads that `calls` waiting calls need, as far as the system has any.

        A call that gets no thread waits for a later one, or ends at its deadline.
        """
        try:
            if self._watcher is None:
                watcher = threading.Thread(target=self._watch, name=f"{self._name}-deadlines", daemon=True)
                watcher.start()
                self._watcher = watcher
            while self._threads < self._max_threads and self._idle < calls:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
                self._idle += 1
        except RuntimeError:
            # The system has no thread left.
            return

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                outcome = call.run()
            except Exception as error:  # noqa: BLE001  reported to `done`
                outcome = error
            with self._lock:
                if call.ended:
                    self._abandoned[call.key] -= 1
                    return
                call.ended = True
            _tell(call, outcome)
            with self._lock:
                self._running.remove(call)
                self._idle += 1
                self._all_ended.notify_all()
            # Nothing of a call may live through the wait for the next: it may hold a response sender.
            call = outcome = None

    def _next(self) -> _Call | None:
        """The next call; None where the pool is closed. A thread that comes here is counted as idle already."""
        with self._lock:
            while not self._waiting and not self._closing:
                self._call_waits.wait()
            self._idle -= 1
            if not self._waiting:
                self._threads -= 1
                return None
            call = self._waiting.popleft()
            self._running.add(call)
            return call

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closing:
            with self._lock:
                while not (self._waiting or self._running or self._closing):
                    self._call_exists.wait()
                    last = time.monotonic()
            time.sleep(_WATCH_S)
            now = time.monotonic()
            if now - last > self._standstill_s:
                with self._lock:
                    for call in (*self._waiting, *self._running):
                        call.deadline += now - last
            last = now
            self._end_late(now)

    def _end_late(self, now: float) -> None:
        with self._lock:
            unstarted = [call for call in self._waiting if now > call.deadline]
            for call in unstarted:
                self._waiting.remove(call)
            late = [call for call in self._running if now > call.deadline and not call.ended]
            self._timeouts += len(late)
            self._abandon(late)
        for call in unstarted:
            _tell(call, CallTimeoutError(f"{call.key}: the call was not started in time", started=False))
        for call in late:
            _tell(call, CallTimeoutError(f"{call.key}: no answer in time", started=True))

    def _abandon(self, calls: list[_Call]) -> None:
        """Under the lock: take the calls' threads for lost."""
        for call in calls:
            call.ended = True
            self._running.remove(call)
            self._abandoned[call.key] += 1
            self._threads -= 1
        self._start_threads(len(self._waiting))


def _tell(call: _Call, outcome: object) -> None:
    """Call `done`. An error in it is printed like that of a thread, and does not end the thread."""
    try:
        call.done(outcome)
    except Exception:  # noqa: BLE001
        threading.excepthook(threading.ExceptHookArgs([*sys.exc_info(), threading.current_thread()]))
