"""Pauses between restarts of something that ended by itself."""

from __future__ import annotations


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
