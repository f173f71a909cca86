"""What goes on whatever happens: loops whose rounds may fail, and the pauses before a restart."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator

_MAX_PAUSE_S = 10.0


class Backoff:
    """Pauses of `first_s` seconds, doubled at each restart up to `max_s`; `first_s` again after a healthy run."""

    def __init__(self, first_s: float = 0.5, max_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def pause(self, ran_s: float) -> float:
        """Seconds to wait before the next start; ran_s: how long the last run lasted, in seconds."""
        if ran_s > self._healthy_s:
            self._next_s = self._first_s
        pause_s = self._next_s
        self._next_s = min(2.0 * self._next_s, self._max_s)
        return pause_s


class Failures:
    """Catches what the rounds of one loop raise, counts and logs it. what: says in the log what has failed.

    in_a_row: failed rounds since the last good one; pause_s: to wait before the next round because of them, seconds.
    A failure is logged where its text is another one than before, and each time that `in_a_row` has doubled: the log
    stays small where every round fails. log: raises nothing.
    """

    def __init__(self, log: Callable[[str], None], what: str) -> None:
        self.in_a_row = 0
        self.pause_s = 0.0
        self._log = log
        self._what = what
        self._backoff = Backoff(max_s=_MAX_PAUSE_S)
        self._text = ""

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """The block is one round; what it raises ends here."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  the loop must not end
            self.in_a_row += 1
            self.pause_s = self._backoff.pause(0.0)
            before, self._text = self._text, repr(error)
            if self.in_a_row.bit_count() == 1 or self._text != before:
                self._log(f"{self._what} failed, {self.in_a_row} in a row: {self._text}")
        else:
            if self.in_a_row:
                self.in_a_row, self.pause_s, self._backoff = 0, 0.0, Backoff(max_s=_MAX_PAUSE_S)


async def repeat(name: str, step: Callable[[], Awaitable[None]], period_s: float, log: Callable[[str], None]) -> None:
    """As `Loop` on an event loop, until the task is cancelled. period_s: seconds between two rounds."""
    failures = Failures(log, f"a round of {name}")
    while True:
        with failures.caught():
            await step()
        await asyncio.sleep(period_s + failures.pause_s)


class Loop:
    """A thread that repeats `step` until `stop`. While rounds fail, the pauses between them grow up to 10 s.

    step: returns the seconds until the next round. wait: sleeps for so long, or less. stopped: set by `stop`.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float],
        log: Callable[[str], None],
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.stopped = threading.Event()
        self._step = step
        self._wait = wait or self.stopped.wait
        self._failures = Failures(log, f"a round of {name}")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, whose first round begins at once."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Begin no further round; wait for the one that runs, at most `timeout_s` seconds."""
        self.stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self.stopped.is_set():
            with self._failures.caught():
                self._wait(self._step())
            self.stopped.wait(self._failures.pause_s)
