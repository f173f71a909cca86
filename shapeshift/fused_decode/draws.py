"""Random numbers that depend on a seed and a position alone: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

Its n-th number is a function of the start and n, so there is no state to advance: what one row of a batch
draws never depends on the other rows, on when its request joined, or on how often the loop ran before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))

Words = npt.NDArray[np.uint64]


def splitmix(starts: Words, numbers: npt.NDArray[np.int64]) -> Words:
    """The output number `numbers` (0, 1, ...) of the generators that begin at `starts`; UINT64 [n]."""
    mixed: Words = starts + (numbers.astype(np.uint64) + np.uint64(1)) * _STEP
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def uniforms(seeds: Words, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), with 53 random bits.

    The seed is mixed first, so that neighbouring seeds are as good as any.
    """
    starts = splitmix(seeds, np.zeros_like(positions))
    bits = splitmix(starts, positions) >> np.uint64(11)
    return np.asarray(bits * 2.0**-53, dtype=np.float64)
