"""Who leaves before the answer is complete: on demand, or because its time has run out."""

from __future__ import annotations

import heapq
import itertools
from collections import deque

from shapeshift.errors import OverloadedError
from shapeshift.fused_decode.sequence import DEADLINE, Sequence

Why = str | Exception


class Departures:
    """Collected from any thread, handed out to the generating one."""

    def __init__(self) -> None:
        self._timed: deque[Sequence] = deque()
        self._demanded: deque[tuple[Sequence, Why]] = deque()
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()

    def watch(self, sequence: Sequence) -> None:
        """Keep the deadline of `sequence`, if it has one; any thread."""
        if sequence.deadline is not None:
            self._timed.append(sequence)

    def demand(self, sequence: Sequence, why: Why) -> None:
        """Let `sequence` end with a finish reason or an error; any thread."""
        self._demanded.append((sequence, why))

    def due(self, now: float) -> list[tuple[Sequence, Why]]:
        """Who leaves now, and why; the generating thread."""
        found: list[tuple[Sequence, Why]] = []
        while self._demanded:
            found.append(self._demanded.popleft())
        while self._timed:
            sequence = self._timed.popleft()
            assert sequence.deadline is not None
            heapq.heappush(self._deadlines, (sequence.deadline, next(self._numbers), sequence))
        while self._deadlines and self._deadlines[0][0] <= now:
            late = heapq.heappop(self._deadlines)[2]
            found.append((late, DEADLINE if late.generated else OverloadedError(_TOO_LATE)))
        return [(sequence, why) for sequence, why in found if not sequence.ended]


_TOO_LATE = "latency_ms ran out before the first token; retry later or elsewhere"
