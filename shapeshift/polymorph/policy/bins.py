"""Bin edges for static-length engines: the optimum for a length histogram, or the steps of the latency curve.

The paper (Arlo, section 3.1) spaces its runtimes evenly. `optimal_edges` minimises the mean latency of the
histogram's requests by dynamic programming over lengths, exactly, for any latency curve.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Two totals that differ by less than rounding are a tie, and a tie goes to fewer edges.
_ROUNDING = 1e-12


def optimal_edges(
    hist: Sequence[float], latency: Sequence[float], k: int, dynamic: Sequence[float] | None = None
) -> tuple[list[int], float]:
    """At most `k` ascending edges, the last `len(hist)`, and the mean latency they give.

    hist: requests of length 1, 2, ...; latency: of a static engine of max length 1, 2, ...; both equally long.
    A request runs on the smallest edge that holds it. Fewest edges on ties. O(k n^2).
    dynamic: latency by length of an engine that takes any length; each bin then costs the minimum of its static
    engine and the dynamic one.
    Raises ValueError for an all-zero histogram.
    """
    counts = np.concatenate([[0.0], np.cumsum(np.asarray(hist, dtype=float))])
    total = counts[-1]
    if total <= 0:
        raise ValueError("the histogram holds no request")
    n = len(hist)
    cost = np.asarray(latency, dtype=float)
    # bin_cost[i, j]: all requests of length i+1..j+1 on an engine of length j+1.
    bin_cost = (counts[None, 1:] - counts[:n, None]) * cost[None, :]
    if dynamic is not None:
        spent = np.concatenate([[0.0], np.cumsum(np.asarray(hist) * np.asarray(dynamic, dtype=float))])
        bin_cost = np.minimum(bin_cost, spent[None, 1:] - spent[:n, None])
    bin_cost[np.tril_indices(n, -1)] = np.inf
    best = bin_cost[0].copy()
    previous: list[npt.NDArray[np.intp]] = []
    chosen, chosen_cost = 1, best[-1]
    for edges in range(2, min(k, n) + 1):
        # candidate[i, j]: the best way to cover 1..i, then one bin i+1..j+1.
        candidate = best[: n - 1, None] + bin_cost[1:, :]
        split = candidate.argmin(axis=0)
        best = candidate[split, np.arange(n)]
        previous.append(split)
        if best[-1] < chosen_cost * (1 - _ROUNDING):
            chosen, chosen_cost = edges, best[-1]
    return _trace(previous, chosen, n), float(chosen_cost / total)


def step_ends(lengths: Sequence[int], latency: Sequence[float], tolerance: float = 0.05) -> list[int]:
    """The last length of every step of a measured latency curve, ascending; the last of `lengths` always ends one.

    Kernels work in tiles of lengths (Arlo, section 2.2). lengths: strictly ascending; latency: of each. A step
    continues while latency stays within `tolerance` (a share) of its first value. An engine that is slower than a
    longer one is useless, so the curve is first lowered to the least latency of any length from there on.
    """
    curve = np.minimum.accumulate(np.asarray(latency, dtype=float)[::-1])[::-1]
    ends = []
    first = curve[0]
    for index in range(1, len(curve)):
        if curve[index] > first * (1 + tolerance):
            ends.append(int(lengths[index - 1]))
            first = curve[index]
    return [*ends, int(lengths[-1])]


def _trace(previous: list[npt.NDArray[np.intp]], edges: int, n: int) -> list[int]:
    end = n - 1
    ends = [n]
    for split in reversed(previous[: edges - 1]):
        end = int(split[end])
        ends.append(end + 1)
    return ends[::-1]
