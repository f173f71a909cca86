"""Logarithms of the probabilities that the model's own logits give, before any parameter changes them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

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
    own = scores[rows, tokens]
    ranks = (scores > own[:, None]).sum(axis=1) + 1
    tops, top_scores = _most_likely(scores) if listed.any() else (np.empty((len(rows), 0), np.int64), scores[:, :0])
    return [
        TokenLogprobs(
            float(own[row] - norms[row]),
            int(ranks[row]),
            tops[row, :count],
            (top_scores[row, :count] - norms[row]).astype(np.float32),
        )
        for row, count in enumerate(listed.tolist())
    ]


def _most_likely(scores: Floats) -> tuple[Integers, Floats]:
    """The tokens with the largest scores, and these, [rows, at most MOST_LISTED]."""
    count = min(MOST_LISTED, scores.shape[1])
    # Always as many, so that equal scores at the end of a row's list do not depend on the other rows.
    # Several times faster than numpy's argpartition.
    found = np.sort(torch.topk(torch.from_numpy(scores), count, dim=1, sorted=False).indices.numpy(), axis=1)
    order = np.argsort(-np.take_along_axis(scores, found, axis=1), axis=1, kind="stable")
    tops = np.take_along_axis(found, order, axis=1)
    return tops, np.take_along_axis(scores, tops, axis=1)
