"""Words, pruned texts, and tokenizers that differ."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from shapeshift.cascade.policy import pruning
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer

TEXTS = ["one two  three", " lead and trail\n", "naïve  東京 tower", "a", "tab\tand\u00a0nbsp", "   "]


@pytest.mark.parametrize("text", TEXTS)
def test_spans_are_what_stands_between_white_space(text: str) -> None:
    raw = text.encode()
    assert [raw[start:end].decode() for start, end in pruning.word_spans(raw)] == text.split()


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS[1:2], TEXTS[2:3], TEXTS[:2], TEXTS[2:4], ["x y", "y x"]])
def test_tokens_find_their_words(demo_checkpoint: Path, texts: list[str]) -> None:
    tokenizer = TextTokenizer(demo_checkpoint / FILE_NAME, 64)
    raw = [text.encode() for text in texts]
    encoded = tokenizer.encode_with_offsets(raw[0], raw[1] if len(raw) > 1 else None)
    spans = [pruning.word_spans(text) for text in raw]
    found = pruning.words_of_tokens(encoded.offsets, spans)
    expected = [(number, span) for number, own in enumerate(spans) for span in own]
    at = -1
    for token, word in enumerate(found.tolist()):
        start, end = encoded.offsets[token].tolist()
        if start < 0:
            assert word == -1
            continue
        at = max(at, word)
        text, (low, high) = expected[word]
        assert low <= start < end <= high, (texts, token)
        piece = raw[text][start:end].decode().lower()
        assert piece
    # Every word has a token, in order.
    assert sorted({word for word in found.tolist() if word >= 0}) == list(range(len(expected)))


def test_white_space_and_empty_tokens_belong_to_no_word() -> None:
    spans = [pruning.word_spans(b"ab cd")]
    offsets = np.array([[-1, -1], [0, 2], [2, 3], [2, 5], [5, 5], [-1, -1]], np.int32)
    # A token may carry the blank before its word.
    assert pruning.words_of_tokens(offsets, spans).tolist() == [-1, 0, -1, 1, -1, -1]


def test_a_second_text_without_special_tokens_between() -> None:
    spans = [pruning.word_spans(b"ab cd"), pruning.word_spans(b"ef")]
    offsets = np.array([[0, 2], [3, 5], [0, 2]], np.int32)
    assert pruning.words_of_tokens(offsets, spans).tolist() == [0, 1, 2]


def test_what_is_left_keeps_order_and_never_empties_a_text() -> None:
    rng = random.Random(3)
    for _ in range(200):
        texts = [" ".join(f"w{rng.randint(0, 9)}" for _ in range(rng.randint(1, 8))) for _ in range(rng.randint(1, 2))]
        raw = [text.encode() for text in texts]
        spans = [pruning.word_spans(text) for text in raw]
        offsets: list[tuple[int, int]] = [(-1, -1)]
        for own in spans:
            offsets += [*own, (-1, -1)]
        importance = np.array([rng.random() for _ in offsets])
        alpha = rng.choice([0.0, 0.5, 1.0, 3.0])
        left, gone = pruning.prune_texts(raw, np.array(offsets, np.int32), importance, alpha)
        assert len(left) == len(raw) and all(left)
        kept = [text.decode().split() for text in left]
        assert gone == sum(len(text.split()) for text in texts) - sum(map(len, kept))
        inside = [i for i, pair in enumerate(offsets) if pair[0] >= 0]
        mean = importance[inside].mean()
        keeps = iter([importance[i] > alpha * mean for i in inside])
        wanted = [[word for word in text.split() if next(keeps)] for text in texts]
        if not any(wanted):
            assert left == raw
        else:
            assert kept == [own or text.split() for own, text in zip(wanted, texts, strict=True)]


def test_a_text_that_loses_nothing_stays_as_it_was() -> None:
    raw = [b"  two   words "]
    offsets = np.array([[-1, -1], [2, 5], [8, 13], [-1, -1]], np.int32)
    assert pruning.prune_texts(raw, offsets, np.array([9.0, 1.0, 1.0, 9.0]), 0.5) == (raw, 0)
    assert pruning.prune_texts(raw, offsets, np.array([9.0, 1.0, 0.1, 9.0]), 0.5) == ([b"two"], 1)
