from __future__ import annotations

import re

import numpy as np
import pytest

from shapeshift.workloads.text import TextMaker


def maker(seed: int = 0, **arguments: object) -> TextMaker:
    return TextMaker(np.random.default_rng(seed), **arguments)  # type: ignore[arg-type]


def words_and_marks(text: str) -> int:
    return len(re.findall(r"[A-Za-z]+|[.,]", text))


def by_syllable(text: str) -> int:
    """A fake tokenizer: one token for every three letters of a word, and two special tokens."""
    return 2 + sum(-(-len(piece) // 3) for piece in re.findall(r"[A-Za-z]+|[.,]", text))


@pytest.mark.parametrize("tokens", [3, 4, 10, 57, 512])
def test_without_a_counter_a_text_has_the_requested_tokens(tokens: int) -> None:
    assert words_and_marks(maker().text(tokens)) + 2 == tokens


def test_a_text_has_at_least_a_word() -> None:
    for tokens in (0, 1, 2):
        assert words_and_marks(maker().text(tokens)) == 1
        assert words_and_marks(maker(count=by_syllable).text(tokens)) == 1


def test_with_a_counter_a_text_is_close_and_never_longer() -> None:
    made = maker(count=by_syllable)
    for tokens in range(8, 400, 7):
        assert tokens - 4 <= by_syllable(made.text(tokens)) <= tokens


def test_it_reads_like_english() -> None:
    text = maker().text(400)
    assert text[0].isupper()
    assert not re.search(r"\s[.,]|  |[.,][A-Za-z]|\. [a-z]", text)
    assert len(set(text.lower().split())) > 60


def test_the_seed_decides_the_texts() -> None:
    def five(seed: int) -> list[str]:
        made = maker(seed)
        return [made.text(30) for _ in range(5)]

    assert five(1) == five(1)
    assert five(1) != five(2)
    assert len(set(five(1))) == 5
