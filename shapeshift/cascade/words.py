"""The words of a text, and the text that is left of it: what any two tokenizers have in common (Tabi, section 4.2).

A word is what stands between white space. A token belongs to the word in which its last byte lies.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from shapeshift.cascade.prune import prune
from shapeshift.cascade.softmax import Array

_WORD = re.compile(r"\S+")
_ASCII_WORD = re.compile(rb"\S+")

Spans = list[tuple[int, int]]


class Pruned(NamedTuple):
    """The texts that are left of one input, and how many words went."""

    texts: list[bytes]
    words: int


def spans(text: bytes) -> Spans:
    """Where each word of the UTF-8 text begins and ends, in bytes."""
    if text.isascii():
        return [match.span() for match in _ASCII_WORD.finditer(text)]
    found, at, seen = [], 0, 0
    decoded = text.decode()
    for match in _WORD.finditer(decoded):
        start = at + len(decoded[seen : match.start()].encode())
        at = start + len(match[0].encode())
        seen = match.end()
        found.append((start, at))
    return found


def words_of_tokens(offsets: Array, texts: Sequence[Spans]) -> Array:
    """The word of each token, [tokens], counted on through all texts; -1 for special tokens and those of no word.

    offsets: [tokens, 2] as OFFSETS; texts: the words of each of one or two texts.
    """
    # A text has few tokens: a loop is faster than arrays.
    text_of = _texts_of(offsets, len(texts))
    starts = [[start for start, _ in own] for own in texts]
    firsts = [0, *accumulate(map(len, texts))]
    found = []
    for (start, end), text in zip(offsets.tolist(), text_of, strict=True):
        place = bisect_right(starts[text], end - 1) - 1
        within = end > start and place >= 0 and end <= texts[text][place][1]
        found.append(place + firsts[text] if within else -1)
    return np.array(found, np.int64)


def left_of(texts: Sequence[bytes], offsets: Array, importance: Array, alpha: float) -> Pruned:
    """What Eq. 5 leaves of one input; a text that would lose all its words, or loses none, stays as it is."""
    words = [spans(text) for text in texts]
    keeps = prune(importance, words_of_tokens(offsets, words), sum(map(len, words)), alpha).words.tolist()
    left, first, gone = [], 0, 0
    for text, own in zip(texts, words, strict=True):
        keep = keeps[first : first + len(own)]
        first += len(own)
        kept = sum(keep)
        if kept in (0, len(own)):
            left.append(text)
            continue
        gone += len(own) - kept
        left.append(b" ".join(text[start:end] for (start, end), stays in zip(own, keep, strict=True) if stays))
    return Pruned(left, gone)


def _texts_of(offsets: Array, texts: int) -> list[int]:
    """Which text each token stands in: a second one begins behind special tokens in the middle, or where counting
    starts anew."""
    if texts == 1:
        return [0] * len(offsets)
    special = offsets[:, 0] < 0
    after = np.concatenate([[True], special[:-1]])
    back = np.concatenate([[False], offsets[1:, 0] < offsets[:-1, 0]])
    begins = ~special & (after | back)
    return [int(text) for text in np.clip(np.cumsum(begins) - 1, 0, texts - 1)]
