"""The steps of a measured latency curve (Arlo, section 2.2: kernels work in tiles of lengths)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def step_ends(lengths: Sequence[int], latency: Sequence[float], tolerance: float = 0.05) -> list[int]:
    """The last length of every step, ascending; the last of `lengths` always ends one.

    lengths ascend strictly; latency belongs to them. A step goes on while latency stays within
    `tolerance` (a share) of its first value. A length is never worth an engine that is slower than a
    longer one's, so the curve is first lowered to the least latency of any length from there on.
    """
    curve = np.minimum.accumulate(np.asarray(latency, dtype=float)[::-1])[::-1]
    ends = []
    first = curve[0]
    for index in range(1, len(curve)):
        if curve[index] > first * (1 + tolerance):
            ends.append(int(lengths[index - 1]))
            first = curve[index]
    return [*ends, int(lengths[-1])]
