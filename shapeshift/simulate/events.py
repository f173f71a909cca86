"""The core of every simulation: a clock, and what happens at which time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Progress = Callable[[int, int], None]
"""(arrivals so far, arrivals in all)"""
# Arrivals between two calls of `progress`.
_CHUNK = 50_000


class Events:
    """Calls actions in the order of their times, at one time in the order in which they were added.

    now: seconds. An arrival comes before all else that is due at its time.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._added = 0
        self._end = 0.0

    def at(self, when: float, action: Callable[[Any], None], value: Any = None) -> None:
        """Call `action(value)` at `when`, which is not before `now`."""
        self._added += 1
        heapq.heappush(self._due, (when, self._added, action, value))

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        """Call `action` every `period_s` seconds, up to the last arrival."""

        def again(_: None) -> None:
            if self.now <= self._end:
                action()
                self.at(self.now + period_s, again)

        self.at(self.now + period_s, again)

    def run(self, at_s: NDArray[np.float64], arrive: Callable[[int], object], progress: Progress | None = None) -> None:
        """Call `arrive(index)` at each of the times `at_s`, ascending, and all else when it is due, to the end."""
        due, pop = self._due, heapq.heappop
        self._end = float(at_s[-1]) if len(at_s) else 0.0
        index = 0
        for start in range(0, len(at_s), _CHUNK):
            for at in at_s[start : start + _CHUNK].tolist():
                while due and due[0][0] < at:
                    self.now, _, action, value = pop(due)
                    action(value)
                self.now = at
                arrive(index)
                index += 1
            if progress is not None:
                progress(index, len(at_s))
        while due:
            self.now, _, action, value = pop(due)
            action(value)
