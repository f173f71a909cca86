"""Bin edges for static-length engines: the exact optimum over a length histogram.

The paper (Arlo, section 3.1) spaces its runtimes evenly; here the edges minimise the mean latency of the
histogram's requests, by dynamic programming over lengths, exact for any latency law.
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

    hist: requests of length 1, 2, ...; latency: of a static engine of max length 1, 2, ...; both of one
    length. A request runs on the smallest edge that holds it. Fewest edges on ties. O(k n^2).
    With `dynamic`, the latency of an engine that takes any length, by length, each bin costs the less of
    its static engine and of the dynamic one.
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


def _trace(previous: list[npt.NDArray[np.intp]], edges: int, n: int) -> list[int]:
    end = n - 1
    found = [n]
    for split in reversed(previous[: edges - 1]):
        end = int(split[end])
        found.append(end + 1)
    return found[::-1]
