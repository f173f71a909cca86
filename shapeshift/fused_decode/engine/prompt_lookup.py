"""Proposals without a draft model: what followed the last tokens of a text where they occurred before.

Prompt lookup decoding (Saxena, 2023): texts that summarise, edit or quote their prompts repeat parts of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


def look_up(tokens: Tokens, lengths: Integers, most: int, shortest: int, longest: int) -> list[Tokens]:
    """A proposal of at most `most` tokens for each row, empty where there is none.

    tokens    INT32 [rows, width], the texts
    lengths   INT64 [rows], their numbers of tokens, at least 1
    shortest  fewest last tokens of a text that must have occurred before
    longest   most last tokens that are compared

    Of all places the one where most tokens agree is taken. Of equal ones it is the last one that `most` tokens follow,
    or else the first one, which most tokens follow: a text that repeats itself every few tokens is continued so.
    """
    rows = np.arange(len(lengths))
    width = int(lengths.max())
    last = tokens[rows, lengths - 1]
    is_inside = np.arange(width) < (lengths - 1)[:, None]
    row, place = np.nonzero((tokens[:, :width] == last[:, None]) & is_inside)
    agreeing = np.ones(len(row), np.int64)
    left = np.arange(len(row))
    for back in range(1, longest):
        left = left[place[left] >= back]
        left = left[tokens[row[left], place[left] - back] == tokens[row[left], lengths[row[left]] - 1 - back]]
        agreeing[left] += 1
    following = lengths[row] - 1 - place
    order = np.where(following >= most, width + place, width - place)
    ranks = np.where(agreeing >= shortest, agreeing * (2 * width + 1) + order, 0)
    best = np.zeros(len(rows), np.int64)
    np.maximum.at(best, row, ranks)
    found = [tokens[0, :0]] * len(rows)
    for match in np.flatnonzero((ranks > 0) & (ranks == best[row])).tolist():
        own, first = row[match], place[match] + 1
        found[own] = tokens[own, first : min(first + most, lengths[own])]
    return found
