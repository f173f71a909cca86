"""Draws from what min_p, top_k and top_p leave, in this order, for all rows of a batch at once.

Sorting a vocabulary takes longer than the model's own step, so what a row keeps is looked for among the tokens
that reach the n-th largest of its columns' maxima: whatever they are, these are the row's largest, and at least n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Below this score the weight is 0 in FLOAT32.
_NOTHING = np.float32(-100)


@dataclass(frozen=True)
class Filters:
    """What each row keeps.

    top_k INT64 [rows]: so many tokens, 0: all; top_p FLOAT32 [rows]: the likeliest tokens that together have this
    share of what the others leave, 1: all; min_p FLOAT32 [rows]: tokens with this share of the likeliest one's
    weight, 0: all.
    """

    top_k: Array
    top_p: Floats
    min_p: Floats

    def of(self, rows: Array) -> Filters:
        """Those of some rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])

    @property
    def active(self) -> Array:
        """Which rows have any; BOOL [rows]."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def draw(scores: Floats, filters: Filters, uniforms: Doubles) -> Array:
    """One token a row, drawn from what its filters leave; INT64 [rows].

    scores FLOAT32 [rows, depth, columns]: token t's stands at [t // columns, t % columns]. A token's weight is
    exp(score), and the likeliest one's score is 0. uniforms [rows]: in [0, 1).
    """
    columns = scores.shape[2]
    maxima = scores.max(axis=1)
    bounds = np.full(len(scores), _NOTHING)
    counted = (filters.top_k > 0) & (filters.top_k <= columns)
    if counted.any():
        bounds[counted] = _nth_largest(maxima[counted], int(filters.top_k[counted].max()))
    limited = filters.min_p > 0
    bounds[limited] = np.maximum(bounds[limited], np.log(filters.min_p[limited]))
    tokens = np.zeros(len(scores), np.int64)
    rows = np.flatnonzero(counted | limited)
    if rows.size:
        tokens[rows], _ = _draw_among(_of(scores, rows), bounds[rows], filters.of(rows), uniforms[rows])
    rows = np.flatnonzero(~(counted | limited))
    if rows.size:
        tokens[rows] = _draw_by_share(_of(scores, rows), maxima[rows], filters.of(rows), uniforms[rows])
    return tokens


def _draw_by_share(scores: Floats, maxima: Floats, filters: Filters, uniforms: Doubles) -> Array:
    """Draws of rows whose filters do not say how far down they reach."""
    columns = scores.shape[2]
    tokens = np.zeros(len(scores), np.int64)
    whole = np.exp(scores).sum(axis=1).sum(axis=1, dtype=np.float64)
    left = np.arange(len(scores))
    # Few candidates do for most rows; a flat distribution needs more, or all.
    for reach in (max(columns // 4, 1), columns, 0):
        bounds = _nth_largest(maxima[left], reach) if reach else np.full(left.size, _NOTHING)
        found, certain = _draw_among(_of(scores, left), bounds, filters.of(left), uniforms[left], whole[left])
        tokens[left] = found
        left = left[~certain]
        if not left.size:
            break
    return tokens


def _draw_among(
    scores: Floats, bounds: Floats, filters: Filters, uniforms: Doubles, whole: Doubles | None = None
) -> tuple[Array, Array]:
    """Draws from the tokens with scores of at least `bounds` [rows], and whether nothing below them mattered.

    whole: the weight of all tokens of a row; None where the filters keep none below the bounds.
    """
    ordered, tokens = _shortlist(scores, np.maximum(bounds, _NOTHING))
    rows, width = np.arange(len(ordered)), ordered.shape[1]
    weights = np.exp(ordered)
    keep = np.where(filters.top_k > 0, filters.top_k, width + 1)
    weights[np.arange(width) >= keep[:, None]] = 0
    upto = np.cumsum(weights, axis=1, dtype=np.float64)
    complete = (whole is None) | (keep <= (weights > 0).sum(axis=1))
    share = filters.top_p * (upto[:, -1] if whole is None else np.where(complete, upto[:, -1], whole))
    reached = upto >= share[:, None]
    certain = reached.any(axis=1) & (complete | (keep > width))
    last = np.where(reached.any(axis=1), reached.argmax(axis=1), width - 1)
    place = (upto <= (uniforms * upto[rows, last])[:, None]).sum(axis=1)
    return tokens[rows, np.minimum(place, last)], certain


def _shortlist(scores: Floats, bounds: Floats) -> tuple[Floats, Array]:
    """The scores of at least `bounds`, descending, padded with -inf, and their tokens; equal ones by token."""
    size = scores[0].size
    places = np.flatnonzero(scores >= bounds[:, None, None])
    rows = places // size
    counts = np.bincount(rows, minlength=len(scores))
    within = np.arange(len(places)) - (np.cumsum(counts) - counts)[rows]
    found = np.full((len(scores), counts.max()), -np.inf, np.float32)
    tokens = np.zeros(found.shape, np.int64)
    found[rows, within] = scores.reshape(-1)[places]
    tokens[rows, within] = places - rows * size
    order = np.argsort(-found, axis=1, kind="stable")
    return np.take_along_axis(found, order, axis=1), np.take_along_axis(tokens, order, axis=1)


def _nth_largest(maxima: Floats, n: int) -> Floats:
    """The n-th largest of each row."""
    return np.partition(maxima, -n, axis=1)[:, -n]


def _of(scores: Floats, rows: Array) -> Floats:
    return scores if len(rows) == len(scores) else scores[rows]
