"""The threads in which calls to later levels wait, and what happens to a call that is not answered.

A call cannot be taken back (Triton 24.10): one that takes too long is given up, its thread lost until it returns, and
another thread takes its place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shapeshift.cascade.levels import Found, LevelGoneError
from shapeshift.errors import InvalidInputError, OverloadedError
from shapeshift.serving.metrics import Counter, Gauge

_LOOK_S = 0.02
_MOST_DOUBLINGS = 4
# Threads that a level which never answers may keep; then it is not called until one returns.
_MOST_LOST = 64
Outcome = Found | Exception


@dataclass(eq=False)
class Call:
    """One call under way. run() asks the level; done(outcome) is called once, on a thread of the pool."""

    model: str
    run: Callable[[], Found]
    done: Callable[[Outcome], None]
    deadline: float
    # Whether its deadline is the caller's own, of which the level cannot know.
    impatient: bool
    ended: bool = field(default=False)


@dataclass
class _Health:
    """What is known of one model: failures in a row, until when it is left alone, threads that wait for it in vain."""

    failures: int = 0
    quiet_until: float = 0.0
    lost: int = 0


class CallPool:
    """At most `threads` calls at a time; a model that failed is left alone for a while."""

    def __init__(self, threads: int, most_waiting: int, timeout_s: float, retry_s: float) -> None:
        self._most_waiting = most_waiting
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._wake = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._running: list[Call] = []
        self._health: dict[str, _Health] = {}
        self._closing = False
        self._calls, self._failures, self._timeouts = 0, 0, 0
        for _ in range(threads):
            self._start_thread()
        self._watcher = threading.Thread(target=self._watch, name="call-deadlines", daemon=True)
        self._watcher.start()

    @property
    def under_way(self) -> int:
        """Calls that wait or run."""
        return len(self._waiting) + len(self._running)

    def metrics(self) -> list[Counter | Gauge]:
        """What is exported of the calls."""
        return [
            Counter("level_calls_total", "Calls to later levels that were answered", read=lambda: self._calls),
            Counter("level_failures_total", "Calls to later levels that failed", read=lambda: self._failures),
            Counter("level_timeouts_total", "Calls to later levels that were given up", read=lambda: self._timeouts),
            Gauge("level_calls_running", "Calls to later levels that wait or run", lambda: self.under_way),
        ]

    def submit(
        self,
        model: str,
        run: Callable[[], Found],
        done: Callable[[Outcome], None],
        deadline: float | None = None,
    ) -> None:
        """Ask for run() on another thread; `deadline`: an earlier end than the time-out, in monotonic seconds.

        Raises LevelGoneError for a model that is left alone, OverloadedError where too many calls wait.
        """
        now = time.monotonic()
        end = now + self._timeout_s
        impatient = deadline is not None and deadline < end
        call = Call(model, run, done, end if deadline is None else min(end, deadline), impatient)
        with self._wake:
            health = self._health.setdefault(model, _Health())
            if now < health.quiet_until or health.lost >= _MOST_LOST:
                raise LevelGoneError(f"{model} has failed of late")
            if self._closing:
                raise OverloadedError("the model is being unloaded; retry elsewhere")
            if len(self._waiting) >= self._most_waiting:
                raise OverloadedError(f"queue_calls: {self._most_waiting} calls wait; retry later")
            if health.failures:
                # One call finds out whether it is there again.
                health.quiet_until = end
            self._waiting.append(call)
            self._wake.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Give up what waits, let running calls end within the time, stop the threads."""
        with self._wake:
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()
        for call in waiting:
            call.done(OverloadedError("the model is being unloaded; retry elsewhere"))
        end = time.monotonic() + timeout_s
        while self._running and time.monotonic() < end:
            time.sleep(_LOOK_S)
        for call in list(self._running):
            self._end(call, LevelGoneError(f"{call.model} gave no answer before the model was unloaded"))
        self._watcher.join(timeout_s)

    def _start_thread(self) -> None:
        threading.Thread(target=self._serve, name="level-call", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closing:
                    self._wake.wait()
                if not self._waiting:
                    return
                call = self._waiting.popleft()
                self._running.append(call)
            try:
                outcome: Outcome = call.run()
            except Exception as error:  # noqa: BLE001  whatever a level does, the caller is answered
                outcome = error
            if not self._end(call, outcome):
                # Given up: another thread has taken this one's place.
                with self._wake:
                    self._health[call.model].lost -= 1
                return

    def _end(self, call: Call, outcome: Outcome) -> bool:
        """Whether the call had not ended before; its `done` is called then."""
        with self._wake:
            if call.ended:
                return False
            call.ended = True
            self._running.remove(call)
            self._record(call.model, outcome)
        call.done(outcome)
        return True

    def _record(self, model: str, outcome: Outcome) -> None:
        health = self._health.setdefault(model, _Health())
        failed = isinstance(outcome, Exception)
        self._calls += not failed
        self._failures += failed
        # A model that refuses a text, or is full, is there.
        if not failed or isinstance(outcome, InvalidInputError | OverloadedError):
            health.failures, health.quiet_until = 0, 0.0
            return
        wait_s = self._retry_s * 2 ** min(health.failures, _MOST_DOUBLINGS)
        health.failures += 1
        health.quiet_until = time.monotonic() + wait_s

    def _watch(self) -> None:
        while not self._closing:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            with self._wake:
                late = [call for call in self._running if now > call.deadline]
                unbegun = [call for call in self._waiting if now > call.deadline]
                for call in unbegun:
                    self._waiting.remove(call)
            for call in unbegun:
                call.done(OverloadedError("the request's time ran out while its call waited"))
            for call in late:
                self._give_up(call)

    def _give_up(self, call: Call) -> None:
        with self._wake:
            if call.ended:
                return
            self._timeouts += 1
            self._health.setdefault(call.model, _Health()).lost += 1
        # A call that returns in this instant finds itself ended, or ends first: either way once.
        gone = LevelGoneError(f"{call.model} gave no answer in time")
        if self._end(call, OverloadedError("the request's time ran out") if call.impatient else gone):
            self._start_thread()
        else:
            with self._wake:
                self._health[call.model].lost -= 1
