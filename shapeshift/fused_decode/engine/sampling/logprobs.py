"""Logarithms of the probabilities that the model's own logits give, before any parameter changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Ranking = Callable[[Floats, int], tuple[Floats, Integers]]
"""(logits [rows, vocab_size], count): the `log_norms` of the rows and the `largest` of each.

A row whose norm is NaN may have any places."""

_DEPTH = 64
"""Values in a column."""
MOST_LISTED = 20
"""Most of the most likely tokens that are listed with a token."""


class TokenLogprobs(NamedTuple):
    """One token in its place.

    logprob       of the token
    rank          1 for the most likely token
    top           INT64 [n]    the most likely tokens, most likely first; of equal ones the lower id
    top_logprobs  FLOAT32 [n]
    """

    logprob: float
    rank: int
    top: Integers
    top_logprobs: Floats


def logprobs_of(logits: Floats, tokens: Integers, listed: Integers) -> list[TokenLogprobs]:
    """What `logits`, [rows, vocab_size], say of `tokens`, INT64 [rows].

    listed: INT64 [rows], how many of the most likely tokens are listed, at most `MOST_LISTED`. A row's result does not
    depend on the other rows.
    """
    rows = np.arange(len(logits))
    scores = logits - logits.max(axis=1, keepdims=True)
    norms = np.log(np.exp(scores).sum(axis=1, dtype=np.float64))
    chosen = scores[rows, tokens]
    ranks = (scores > chosen[:, None]).sum(axis=1) + 1
    tops, top_scores = _most_likely(scores) if listed.any() else (np.empty((len(rows), 0), np.int64), scores[:, :0])
    return [
        TokenLogprobs(
            float(chosen[row] - norms[row]),
            int(ranks[row]),
            tops[row, :count],
            (top_scores[row, :count] - norms[row]).astype(np.float32),
        )
        for row, count in enumerate(listed.tolist())
    ]


def _most_likely(scores: Floats) -> tuple[Integers, Floats]:
    """The tokens with the largest scores, and these, [rows, at most MOST_LISTED]."""
    tops = largest(scores, min(MOST_LISTED, scores.shape[1]))
    return tops, np.take_along_axis(scores, tops, axis=1)


def ranking(native: bool = True) -> Ranking:
    """By the compiled kernel, where the runtime has loaded the kernels; else, and with native=False, in numpy."""
    kernel: Any = getattr(torch.ops.shapeshift_decode, "likeliest", None) if native else None
    if kernel is None:
        return lambda logits, count: (log_norms(logits), largest(logits, count))

    def rank(logits: Floats, count: int) -> tuple[Floats, Integers]:
        norms, places = kernel(torch.from_numpy(logits), count)
        return norms.numpy(), places.numpy()

    return rank


def largest(values: Floats, count: int) -> Integers:
    """The places of the `count` largest values of each row, INT64 [rows, count], the largest first, of equal ones the
    lower place.

    A row is split into columns. Its largest values are at least the count-th largest of the columns' maxima, and few
    others are. Several times faster than topk of torch.
    """
    rows, size = values.shape
    columns = size // _DEPTH
    result = np.empty((rows, count), np.int64)
    floors = np.full(rows, -np.inf, np.float32)
    if count <= columns:
        maxima = values[:, : columns * _DEPTH].reshape(rows, _DEPTH, columns).max(axis=1)
        floors = np.partition(maxima, columns - count, axis=1)[:, columns - count]
    for row, (scores, floor) in enumerate(zip(values, floors, strict=True)):
        # Not "at least", which NaN never is.
        places = np.flatnonzero(~(scores < floor))
        result[row] = places[np.argsort(-scores[places], kind="stable")[:count]]
    return result


def log_norms(logits: Floats) -> Floats:
    """What is subtracted from the logits of each row to make logprobs, FLOAT32 [rows]; NaN where one is not finite."""
    best = logits.max(axis=1)
    # Row by row: what fits a core's cache is several times as fast.
    work = np.empty(logits.shape[1], np.float32)
    sums = np.empty(len(logits), np.float32)
    with np.errstate(invalid="ignore"):
        for row, scores in enumerate(logits):
            np.exp(np.subtract(scores, best[row], out=work), out=work)
            sums[row] = work.sum()
        return np.asarray(best + np.log(sums), np.float32)
