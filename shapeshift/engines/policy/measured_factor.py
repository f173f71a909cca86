"""How far recent calls were from their profile."""

from __future__ import annotations

_SMOOTHING = 0.1
_MIN, _MAX = 0.5, 8.0


class MeasuredFactor:
    """`value` is measured time over profiled time of recent calls; 1 before the first."""

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, took: float, profiled: float) -> None:
        """Record one call; both times in the same unit. A call without a profiled time says nothing."""
        if profiled <= 0:
            return
        # One delayed call must not make all others look slow.
        clipped = min(max(took / profiled, self.value / 2), self.value * 2)
        moved = self.value + _SMOOTHING * (clipped - self.value)
        self.value = min(max(moved, _MIN), _MAX)
