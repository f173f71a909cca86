"""Logprobs in OpenAI's shapes, their offsets against those of the tokenizers library."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shapeshift.fused_decode.engine.detokenize import token_bytes
from shapeshift.gateway.apis.generation.completions import CompletionLogprobs
from tests.fused_decode.small_tokenizers import TEXTS, byte_level

TEXT = "a🙂 größer 東é👩‍👧b"


def entries_of(own: bytes) -> dict[str, Any]:
    text = own.decode(errors="replace")
    return {"7": {"logprob": -0.5, "rank": 1, "decoded_token": text, "bytes": list(own)}}


@pytest.mark.parametrize("text", [TEXT, *TEXTS])
@pytest.mark.parametrize("pieces", [1, 3])
def test_offsets_are_those_of_the_tokenizer(tmp_path: Path, text: str, pieces: int) -> None:
    """Of characters of several tokens too, each of which begins where the character does."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = byte_level()
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    table = token_bytes(tmp_path / "tokenizer.json")
    encoding = tokenizer.encode(text)
    tokens = [entries_of(table[token]) for token in encoding.ids]
    assert "\ufffd" in {own["7"]["decoded_token"] for own in tokens} or text != TEXT
    logprobs = CompletionLogprobs(0)
    size = -(-len(tokens) // pieces)
    found = [logprobs.of(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    assert [offset for piece in found for offset in piece["text_offset"]] == [start for start, _ in encoding.offsets]


def test_offsets_behind_bytes_that_are_no_character() -> None:
    """Against the whole text: a place in it is a character's, or is within one that stands for both sides."""
    rng = random.Random(0)
    some = [b"", b"a", b"\xc3", b"\xa9", b"\xe6", b"\x9d\xb1", b"\xff", "é".encode(), b"b\xf0\x9f", b"\x99\x82"]
    for _ in range(500):
        parts = rng.choices(some, k=8)
        whole, wanted, before = b"".join(parts).decode(errors="replace"), [], b""
        for part in parts:
            begun, others = before.decode(errors="replace"), b"".join(parts)[len(before) :].decode(errors="replace")
            wanted.append(len(begun) - (begun + others != whole))
            before += part
        found = CompletionLogprobs(0).of([entries_of(part) for part in parts])["text_offset"]
        assert [at for at, part in zip(found, parts, strict=True) if part] == [
            at for at, part in zip(wanted, parts, strict=True) if part
        ]


def test_the_first_token_of_a_prompt_is_what_the_others_leave() -> None:
    euro = "€".encode()
    scored = [None, entries_of(euro[:1]), entries_of(euro[1:]), entries_of(b"x")]
    found = CompletionLogprobs(0).of([entries_of(b"y")], "ab€x", scored)
    assert found["tokens"] == ["ab", "\ufffd", "\ufffd\ufffd", "x", "y"]
    assert found["text_offset"] == [0, 2, 2, 3, 4]
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
