"""Which adapters are requested next (Chameleon, section 4.1, "Prefetching"; Shahrad et al., ATC 2020)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.settings import require

MIN_GAPS = 4
"""Gaps that an adapter's histogram must have before it predicts anything."""
HORIZON_S = 5.0
"""How far ahead `plan` predicts."""
_FIRST_S, _PER_OCTAVE, _BINS = 0.01, 2, 48


class GapHistograms:
    """Histograms of the gaps between an adapter's requests, in bins that grow by the square root of 2 from 10 ms on.

    The last bin (about two days) also counts all longer gaps. Not safe for concurrent calls.
    """

    def __init__(self, max_adapters: int = 4096) -> None:
        require(max_adapters >= 1, "max_adapters", max_adapters, "at least 1")
        self._max_adapters = max_adapters
        self._last: OrderedDict[str, float] = OrderedDict()
        self._gaps: dict[str, NDArray[np.int64]] = {}
        self._upper = _FIRST_S * 2.0 ** (np.arange(_BINS) / _PER_OCTAVE)

    def record(self, adapter: str, now: float) -> None:
        """Report a request for `adapter` at `now` seconds."""
        if adapter in self._last:
            self._gaps[adapter][self._bin(now - self._last[adapter])] += 1
        else:
            self._gaps[adapter] = np.zeros(_BINS, np.int64)
        self._last[adapter] = now
        self._last.move_to_end(adapter)
        if len(self._last) > self._max_adapters:
            forgotten, _ = self._last.popitem(last=False)
            del self._gaps[forgotten]

    def probability(self, adapter: str, now: float, horizon_s: float) -> float:
        """Probability of a request for `adapter` within `horizon_s` from now, given the time since its last request.

        Gaps are taken to be uniform within a bin. 0 with fewer than `MIN_GAPS` gaps, or if all of them have passed.
        """
        gaps = self._gaps.get(adapter)
        if gaps is None or gaps.sum() < MIN_GAPS:
            return 0.0
        elapsed = max(0.0, now - self._last[adapter])
        longer = self._above(gaps, elapsed)
        return 1.0 - self._above(gaps, elapsed + horizon_s) / longer if longer > 0 else 0.0

    def plan(
        self,
        adapters: Sequence[AdapterInfo],
        resident: Collection[str],
        free_bytes: int,
        now: float,
        horizon_s: float = HORIZON_S,
        min_probability: float = 0.5,
    ) -> list[str]:
        """The adapters to load into `free_bytes` of unused memory, likeliest first; none is evicted for them.

        resident: names that are loaded or loading. min_probability: of a request within `horizon_s`.
        """
        require(horizon_s > 0 and math.isfinite(horizon_s), "horizon_s", horizon_s, "above 0")
        chances = {info.name: self.probability(info.name, now, horizon_s) for info in adapters}
        missing = [info for info in adapters if info.name not in resident and chances[info.name] >= min_probability]
        chosen = []
        for info in sorted(missing, key=lambda info: (-chances[info.name], info.name)):
            if info.bytes <= free_bytes:
                chosen.append(info.name)
                free_bytes -= info.bytes
        return chosen

    def _bin(self, gap_s: float) -> int:
        return min(int(np.searchsorted(self._upper, gap_s)), _BINS - 1)

    def _above(self, gaps: NDArray[np.int64], seconds: float) -> float:
        """Number of gaps longer than `seconds`."""
        at = self._bin(seconds)
        lower = float(self._upper[at - 1]) if at else 0.0
        upper = float(self._upper[at])
        share = min(1.0, max(0.0, (upper - seconds) / (upper - lower)))
        return float(gaps[at + 1 :].sum() + gaps[at] * share)
