"""The words of a text, and the text that is left of it: what any two tokenizers have in common (Tabi, section 4.2).

A word is what stands between white space. A token belongs to the word in which its last byte lies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    inside = offsets[:, 1] > offsets[:, 0]
    word_of = np.full(len(offsets), -1, np.int64)
    text_of = _texts_of(offsets, len(texts))
    first = 0
    for number, own in enumerate(texts):
        member = inside & (text_of == number)
        if own and member.any():
            starts, ends = np.array(own).T
            last = offsets[member, 1] - 1
            place = np.searchsorted(starts, last, side="right") - 1
            within = (place >= 0) & (last < ends[place])
            word_of[member] = np.where(within, place + first, -1)
        first += len(own)
    return word_of


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


def _texts_of(offsets: Array, texts: int) -> Array:
    """Which text each token stands in: a second one begins behind special tokens in the middle, or where counting
    starts anew."""
    if texts == 1:
        return np.zeros(len(offsets), np.int64)
    special = offsets[:, 0] < 0
    after = np.concatenate([[True], special[:-1]])
    back = np.concatenate([[False], offsets[1:, 0] < offsets[:-1, 0]])
    begins = ~special & (after | back)
    return np.asarray(np.clip(np.cumsum(begins) - 1, 0, texts - 1))
