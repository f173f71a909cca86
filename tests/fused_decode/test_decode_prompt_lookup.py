"""What the look-up proposes, against a plain search."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shapeshift.fused_decode.engine.speculation import look_up


def proposed(*texts: str, most: int = 4, shortest: int = 2, longest: int = 4) -> list[str]:
    width = max(map(len, texts)) + 3
    # What lies behind a text is not part of it.
    tokens = np.array([[ord(letter) for letter in text.ljust(width, text[-1])] for text in texts], np.int32)
    found = look_up(tokens, np.array([len(text) for text in texts]), most, shortest, longest)
    return ["".join(map(chr, one)) for one in found]


def searched(text: str, most: int, shortest: int, longest: int) -> str:
    """The same by the definition."""
    for size in range(longest, shortest - 1, -1):
        places = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]] if size else []
        if places:
            full = [end for end in places if len(text) - end >= most]
            at = full[-1] if full else places[0]
            return text[at : at + most]
    return ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat sat on the", " cat"),
        ("abcXY..abcQR..abc", "QR.."),
        ("ZabcXY..yabcQR..Zabc", "XY.."),
        ("ababab", "ab"),
        ("aaa", "a"),
        ("aaaaaaaa", "aaaa"),
        ("abcdef", ""),
        ("xaya", ""),
        ("a", ""),
    ],
)
def test_what_followed_the_last_tokens_is_proposed(text: str, expected: str) -> None:
    assert proposed(text) == [expected]


def test_one_token_is_enough_where_that_is_said() -> None:
    assert proposed("xaya", shortest=1, longest=1) == ["ya"]


def test_random_texts_get_what_a_plain_search_finds() -> None:
    rng = random.Random(0)
    some = 0
    for _ in range(300):
        texts = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 40))) for _ in range(rng.randint(1, 5))]
        most, longest = rng.randint(1, 8), rng.randint(1, 6)
        shortest = rng.randint(1, longest)
        expected = [searched(text, most, shortest, longest) for text in texts]
        assert proposed(*texts, most=most, shortest=shortest, longest=longest) == expected
        some += sum(map(bool, expected))
    assert some > 300
