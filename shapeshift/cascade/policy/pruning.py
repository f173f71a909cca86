"""Which words the next level need not read (Tabi, section 4.2 and Eq. 5).

A word is text between white space, so that levels with different tokenizers agree on it. A token belongs to the
word that contains its last byte.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from shapeshift.cascade.policy.routing import Array

_WORD = re.compile(r"\S+")
_ASCII_WORD = re.compile(rb"\S+")

Spans = list[tuple[int, int]]


class Masks(NamedTuple):
    """1 for each token, and each word, that is kept."""

    tokens: Array
    words: Array


class PrunedTexts(NamedTuple):
    """One input after pruning, and how many words were removed."""

    texts: list[bytes]
    words_removed: int


def masks(importance: Array, word_of: Array, num_words: int, alpha: float) -> Masks:
    """The masks of one input. importance: [tokens]; word_of: [tokens], -1 for a special token or one of no word.

    A token is pruned if its importance is at most `alpha` times the mean over tokens of words; a word is pruned if all
    its tokens are. Tokens of no word and words without tokens are kept. If every word would be pruned, all are kept.
    """
    tokens, words = np.ones(len(importance), np.int64), np.ones(num_words, np.int64)
    in_word = word_of >= 0
    if not in_word.any():
        return Masks(tokens, words)
    of_words, word = importance[in_word], word_of[in_word]
    above = of_words > alpha * of_words.mean()
    if above.any():
        words[word] = 0
        words[word[above]] = 1
        tokens[in_word] = above
    return Masks(tokens, words)


def words_of_ids(special: Sequence[bool], word_ids: Sequence[int | None]) -> Array:
    """`word_of` of `masks`, from two lists of a tokenizer; both are [tokens]."""
    pairs = zip(special, word_ids, strict=True)
    return np.array([-1 if is_special or word is None else word for is_special, word in pairs], dtype=np.int64)


def word_spans(text: bytes) -> Spans:
    """Start and end of each word of the UTF-8 text, in bytes."""
    if text.isascii():
        return [match.span() for match in _ASCII_WORD.finditer(text)]
    spans, at, seen = [], 0, 0
    decoded = text.decode()
    for match in _WORD.finditer(decoded):
        start = at + len(decoded[seen : match.start()].encode())
        at = start + len(match[0].encode())
        seen = match.end()
        spans.append((start, at))
    return spans


def words_of_tokens(offsets: Array, spans: Sequence[Spans]) -> Array:
    """`word_of` of `masks`, from byte positions; words are numbered through all texts.

    offsets: [tokens, 2] as in the output OFFSETS; spans: the words of each of one or two texts.
    """
    # A text has few tokens: a loop is faster than arrays.
    text_of = _texts_of_tokens(offsets, len(spans))
    starts = [[start for start, _ in words] for words in spans]
    first_words = [0, *accumulate(map(len, spans))]
    words = []
    for (start, end), text in zip(offsets.tolist(), text_of, strict=True):
        place = bisect_right(starts[text], end - 1) - 1
        within = end > start and place >= 0 and end <= spans[text][place][1]
        words.append(place + first_words[text] if within else -1)
    return np.array(words, np.int64)


def prune_texts(texts: Sequence[bytes], offsets: Array, importance: Array, alpha: float) -> PrunedTexts:
    """One input without the words that Eq. 5 prunes.

    A text that would lose all its words, or loses none, is returned unchanged.
    """
    spans = [word_spans(text) for text in texts]
    keeps = masks(importance, words_of_tokens(offsets, spans), sum(map(len, spans)), alpha).words.tolist()
    pruned, first, removed = [], 0, 0
    for text, words in zip(texts, spans, strict=True):
        keep = keeps[first : first + len(words)]
        first += len(words)
        left = sum(keep)
        if left in (0, len(words)):
            pruned.append(text)
            continue
        removed += len(words) - left
        pruned.append(b" ".join(text[start:end] for (start, end), stays in zip(words, keep, strict=True) if stays))
    return PrunedTexts(pruned, removed)


def _texts_of_tokens(offsets: Array, num_texts: int) -> list[int]:
    """The text of each token: a second one begins after special tokens in the middle, or where offsets start over."""
    if num_texts == 1:
        return [0] * len(offsets)
    special = offsets[:, 0] < 0
    after_special = np.concatenate([[True], special[:-1]])
    starts_over = np.concatenate([[False], offsets[1:, 0] < offsets[:-1, 0]])
    begins = ~special & (after_special | starts_over)
    return [int(text) for text in np.clip(np.cumsum(begins) - 1, 0, num_texts - 1)]
