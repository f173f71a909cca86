"""Sampling in numpy from the tokens that min_p, top_k and top_p keep, in this order, for all rows at once.

Sorting a vocabulary takes longer than a step of the model, so only a shortlist is sorted. A row's vocabulary is split
into columns; the shortlist has the tokens that reach the n-th largest of the columns' maxima: the row's largest
tokens, at least n of them. If it is too short, tokens are counted by weight instead. Tokens of equal
weight are kept or dropped together.
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
_MIN_SCORE = np.float32(-87)
_BUCKETS = 2048


@dataclass(frozen=True)
class Filters:
    """The filters of each row.

    top_k  INT64 [rows]    keep this many tokens; 0: all
    top_p  FLOAT32 [rows]  keep the most likely tokens with this share of the weight that is left; 1: all
    min_p  FLOAT32 [rows]  keep tokens with at least this share of the most likely one's weight; 0: all
    """

    top_k: Array
    top_p: Floats
    min_p: Floats


def sample(scores: Floats, top_k: Array, top_p: Array, min_p: Array, uniforms: Doubles) -> Array:
    """`draw` with the filters as arrays, see `Filters`."""
    return draw(scores, Filters(top_k, top_p, min_p), uniforms)


def draw(scores: Floats, filters: Filters, uniforms: Doubles) -> Array:
    """One token for each row, drawn from those that its filters keep; INT64 [rows].

    scores    FLOAT32 [rows, depth, columns], changed; token t is at [t // columns, t % columns]. A token's weight is
              exp(score); the most likely token has score 0
    uniforms  FLOAT64 [rows] in [0, 1)

    The token of a row does not depend on the other rows.
    """
    columns = scores.shape[2]
    if filters.min_p.any():
        scores[scores < np.log(np.maximum(filters.min_p, np.exp(_MIN_SCORE)))[:, None, None]] = -np.inf
    for row in np.flatnonzero(filters.top_k > columns):
        values = scores[row].reshape(-1)
        keep = min(int(filters.top_k[row]), values.size)
        values[values < np.partition(values, -keep)[-keep]] = -np.inf
    counted = (filters.top_k > 0) & (filters.top_k <= columns)
    shared = ~counted & (filters.top_p < 1)
    tokens = np.zeros(len(scores), np.int64)
    for rows, chosen in (
        (np.flatnonzero(counted), _draw_counted),
        (np.flatnonzero(shared), _draw_shared),
        (np.flatnonzero(~(counted | shared)), _draw_all),
    ):
        if rows.size:
            whole = rows.size == len(scores)
            left = scores if whole else scores[rows]
            tokens[rows] = chosen(left, filters.top_k[rows], filters.top_p[rows], uniforms[rows])
    return tokens


def _draw_counted(scores: Floats, top_k: Array, top_p: Floats, uniforms: Doubles) -> Array:
    """Tokens of rows whose top_k is at most the number of columns."""
    maxima = scores.max(axis=1)
    listed, tokens = _shortlist(scores, maxima, _nth_largest(maxima, int(top_k.max())))
    ordered = -np.sort(-listed, axis=1)
    rows, width = np.arange(len(ordered)), ordered.shape[1]
    least = ordered[rows, np.minimum(top_k, width) - 1]
    upto = np.cumsum(np.where(ordered >= least[:, None], np.exp(ordered), 0), axis=1, dtype=np.float64)
    last = (upto >= (upto[:, -1] * top_p)[:, None]).argmax(axis=1)
    return _draw_listed(listed, tokens, ordered[rows, last], uniforms)


def _draw_shared(scores: Floats, top_k: Array, top_p: Floats, uniforms: Doubles) -> Array:
    """Tokens of rows that keep a share of the weight."""
    columns = scores.shape[2]
    tokens = np.zeros(len(scores), np.int64)
    weights, maxima = np.exp(scores), scores.max(axis=1)
    share = weights.sum(axis=1).sum(axis=1, dtype=np.float64) * top_p
    left = np.arange(len(scores))
    # A short list is enough for most rows.
    for reach in (max(columns // 4, 1), columns):
        listed, candidates = _shortlist(scores[left], maxima[left], _nth_largest(maxima[left], reach))
        ordered = -np.sort(-listed, axis=1)
        reached = np.cumsum(np.exp(ordered), axis=1, dtype=np.float64) >= share[left][:, None]
        floors = ordered[np.arange(len(left)), reached.argmax(axis=1)]
        enough = reached.any(axis=1)
        tokens[left] = _draw_listed(listed, candidates, floors, uniforms[left])
        left = left[~enough]
        if not left.size:
            return tokens
    left_scores = scores[left]
    left_scores[left_scores < _floors(left_scores, weights[left], share[left])[:, None, None]] = -np.inf
    tokens[left] = _draw_all(left_scores, top_k[left], top_p[left], uniforms[left])
    return tokens


def _draw_all(scores: Floats, top_k: Array, top_p: Floats, uniforms: Doubles) -> Array:
    """One of all tokens with a weight: the first, column by column, whose cumulative weight exceeds the draw."""
    weights = np.exp(scores)
    rows = np.arange(len(weights))
    # Each column is summed alone, so rounding does not depend on the number of rows.
    upto = np.cumsum(weights.sum(axis=1), axis=1, dtype=np.float64)
    targets = uniforms * upto[:, -1]
    column = np.minimum((upto <= targets[:, None]).sum(axis=1), upto.shape[1] - 1)
    rest = targets - np.where(column > 0, upto[rows, column - 1], 0)
    within = weights[rows, :, column]
    inside = np.cumsum(within, axis=1, dtype=np.float64)
    # Rounding may put the draw beyond the column's end; then the column's last token with any weight is chosen.
    last = within.shape[1] - 1 - np.argmax(within[:, ::-1] > 0, axis=1)
    place = np.minimum((inside <= rest[:, None]).sum(axis=1), last)
    return np.asarray(place * weights.shape[2] + column, dtype=np.int64)


def _draw_listed(listed: Floats, tokens: Array, floors: Floats, uniforms: Doubles) -> Array:
    """One of the listed tokens whose scores reach `floors`, in the order of `_draw_all`."""
    rows, width = np.arange(len(listed)), listed.shape[1]
    weights = np.where(listed >= floors[:, None], np.exp(listed), 0)
    upto = np.cumsum(weights, axis=1, dtype=np.float64)
    place = (upto <= (uniforms * upto[:, -1])[:, None]).sum(axis=1)
    last = width - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return np.asarray(tokens[rows, np.minimum(place, last)], dtype=np.int64)


def _floors(scores: Floats, weights: Floats, share: Doubles) -> Floats:
    """The lowest score that the share needs, for rows that need many tokens."""
    rows = np.arange(len(scores))
    buckets = np.minimum(scores * (_BUCKETS / _MIN_SCORE), _BUCKETS - 1).astype(np.int64)
    places = buckets + (rows * _BUCKETS)[:, None, None]
    mass = np.bincount(places.reshape(-1), weights.reshape(-1), len(rows) * _BUCKETS).reshape(-1, _BUCKETS)
    upto = np.cumsum(mass, axis=1)
    bucket = np.minimum((upto < share[:, None]).sum(axis=1), _BUCKETS - 1)
    before = np.where(bucket > 0, upto[rows, bucket - 1], 0)
    only = np.where(buckets == bucket[:, None, None], scores, -np.inf).astype(np.float32)
    listed, _ = _shortlist(only, only.max(axis=1), np.full(len(rows), _MIN_SCORE))
    ordered = -np.sort(-listed, axis=1)
    enough = before[:, None] + np.cumsum(np.exp(ordered), axis=1, dtype=np.float64) >= share[:, None]
    last = np.where(enough.any(axis=1), enough.argmax(axis=1), (ordered > -np.inf).sum(axis=1) - 1)
    return np.asarray(ordered[rows, np.maximum(last, 0)], dtype=np.float32)


def _shortlist(scores: Floats, maxima: Floats, bounds: Floats) -> tuple[Floats, Array]:
    """The scores of at least `bounds`, column by column, padded with -inf; and their tokens."""
    _, depth, columns = scores.shape
    bounds = np.maximum(bounds, _MIN_SCORE)
    # Only a column whose maximum reaches the bound can hold such a score.
    places = np.flatnonzero(maxima >= bounds[:, None])
    rows, held = places // columns, places % columns
    within = scores[rows, :, held]
    hits = np.flatnonzero(within >= bounds[rows, None])
    column = hits // depth
    rows, chosen = rows[column], (hits % depth) * columns + held[column]
    counts = np.bincount(rows, minlength=len(scores))
    rank = np.arange(len(hits)) - (np.cumsum(counts) - counts)[rows]
    listed = np.full((len(scores), counts.max()), -np.inf, np.float32)
    tokens = np.zeros(listed.shape, np.int64)
    listed[rows, rank] = within.reshape(-1)[hits]
    tokens[rows, rank] = chosen
    return listed, tokens


def _nth_largest(maxima: Floats, n: int) -> Floats:
    """The n-th largest of each row."""
    return np.partition(maxima, -n, axis=1)[:, -n]
