"""Which words the next level need not read (Tabi, Eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shapeshift.cascade.softmax import Array


class Masks(NamedTuple):
    """1 for what is kept: each token, and each word."""

    tokens: Array
    words: Array


def prune(importance: Array, word_of: Array, words: int, alpha: float) -> Masks:
    """The masks for one input of so many words. importance: [tokens]; word_of: [tokens], -1: special, or of no word.

    A token goes whose importance is at most `alpha` times the mean of the words' tokens; a word goes with all its
    tokens. What is of no word, and a word without tokens, stays. Where every word would go, all stay.
    """
    tokens, kept = np.ones(len(importance), np.int64), np.ones(words, np.int64)
    belongs = word_of >= 0
    if not belongs.any():
        return Masks(tokens, kept)
    own, of = importance[belongs], word_of[belongs]
    above = own > alpha * own.mean()
    if above.any():
        kept[of] = 0
        kept[of[above]] = 1
        tokens[belongs] = above
    return Masks(tokens, kept)


def words_of(special: Sequence[bool], word_ids: Sequence[int | None]) -> Array:
    """`word_of` from the two lists of a tokenizer: -1 for special tokens and where no word is named."""
    pairs = zip(special, word_ids, strict=True)
    return np.array([-1 if is_special or word is None else word for is_special, word in pairs], dtype=np.int64)
