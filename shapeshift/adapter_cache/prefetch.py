"""Which adapters will soon be asked for (Chameleon, section 4.1, "Prefetching"; Shahrad et al., ATC 2020)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from shapeshift.adapter_cache.interfaces import AdapterInfo
from shapeshift.settings import require

LEAST_GAPS = 4
"""Gaps between an adapter's requests before its histogram is believed."""
_FIRST_S, _PER_OCTAVE, _BINS = 0.01, 2, 48


class Histograms:
    """Gaps between the requests for each adapter, in bins that grow by the square root of 2 from 10 ms on.

    A gap beyond the last bin (about two days) counts as that. Not for two threads at once.
    """

    def __init__(self, most_adapters: int = 4096) -> None:
        require(most_adapters >= 1, "most_adapters", most_adapters, "at least 1")
        self._most = most_adapters
        self._last: OrderedDict[str, float] = OrderedDict()
        self._gaps: dict[str, NDArray[np.int64]] = {}
        self._upper = _FIRST_S * 2.0 ** (np.arange(_BINS) / _PER_OCTAVE)

    def arrived(self, adapter: str, now: float) -> None:
        """A request for `adapter` came at `now` seconds."""
        if adapter in self._last:
            self._gaps[adapter][self._bin(now - self._last[adapter])] += 1
        else:
            self._gaps[adapter] = np.zeros(_BINS, np.int64)
        self._last[adapter] = now
        self._last.move_to_end(adapter)
        if len(self._last) > self._most:
            forgotten, _ = self._last.popitem(last=False)
            del self._gaps[forgotten]

    def probability(self, adapter: str, now: float, horizon_s: float) -> float:
        """That it is asked for within `horizon_s` from now, given how long it has not been; 0 while unknown.

        Within a bin, gaps are taken to be evenly spread. Once all known gaps are past, it is not expected.
        """
        gaps = self._gaps.get(adapter)
        if gaps is None or gaps.sum() < LEAST_GAPS:
            return 0.0
        waited = max(0.0, now - self._last[adapter])
        beyond = self._above(gaps, waited)
        return 1.0 - self._above(gaps, waited + horizon_s) / beyond if beyond > 0 else 0.0

    def _bin(self, gap_s: float) -> int:
        return min(int(np.searchsorted(self._upper, gap_s)), _BINS - 1)

    def _above(self, gaps: NDArray[np.int64], seconds: float) -> float:
        """How many gaps are longer than `seconds`."""
        at = self._bin(seconds)
        lower = float(self._upper[at - 1]) if at else 0.0
        upper = float(self._upper[at])
        share = min(1.0, max(0.0, (upper - seconds) / (upper - lower)))
        return float(gaps[at + 1 :].sum() + gaps[at] * share)


def plan(
    histograms: Histograms,
    adapters: Sequence[AdapterInfo],
    resident: Collection[str],
    free: int,
    now: float,
    horizon_s: float = 5.0,
    least: float = 0.5,
) -> list[str]:
    """Adapters to load into `free` bytes that nothing uses, likeliest first; nothing is evicted for them.

    resident: names that are there or on their way. least: probability of being asked for within `horizon_s`.
    """
    require(horizon_s > 0 and math.isfinite(horizon_s), "horizon_s", horizon_s, "above 0")
    chances = {one.name: histograms.probability(one.name, now, horizon_s) for one in adapters}
    missing = [one for one in adapters if one.name not in resident and chances[one.name] >= least]
    chosen = []
    for one in sorted(missing, key=lambda one: (-chances[one.name], one.name)):
        if one.bytes <= free:
            chosen.append(one.name)
            free -= one.bytes
    return chosen
