"""The shadow price of device time: what a plan for the waiting images takes from future arrivals."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_REFRESH_MS = 100.0
_BISECTIONS = 16


class ShadowPrice:
    """Utility per ms of device time, from the arrivals of the last `window_ms`.

    It is the price at which these arrivals, if all were present at once, would exactly fill the window. Each arrival
    takes the gamma with the highest utility minus time times price, or none: the dual of Eq. 1 without deadlines. The
    price is 0 when the window has time for the best gamma of each arrival.
    """

    def __init__(self, window_ms: float) -> None:
        self._window_ms = window_ms
        self._arrivals: deque[tuple[float, Floats]] = deque()
        self._price = 0.0
        self._refresh_at = -np.inf

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, arrival: float, utilities: Floats) -> None:
        """Record an arrival; utilities [g]: its expected utility at each gamma."""
        self._drop_old(arrival)
        self._arrivals.append((arrival, utilities))

    def at(self, now: float, times: Floats) -> float:
        """The price now; it is recomputed every 100 ms. times [g]: device ms of one image at each gamma."""
        if now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_MS
            self._drop_old(now)
            self._price = self._computed(times)
        return self._price

    def _drop_old(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now - self._window_ms:
            self._arrivals.popleft()

    def _computed(self, times: Floats) -> float:
        if not self._arrivals:
            return 0.0
        # Option 0 is not to run the image.
        options = np.concatenate(([0.0], times))
        utilities = np.zeros((len(self._arrivals), len(options)))
        utilities[:, 1:] = [one for _, one in self._arrivals]

        def fits(price: float) -> bool:
            return float(options[np.argmax(utilities - price * options, axis=1)].sum()) <= self._window_ms

        if fits(0.0):
            return 0.0
        low, high = 0.0, float((utilities[:, 1:] / times).max())
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high
