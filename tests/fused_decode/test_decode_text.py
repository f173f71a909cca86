"""Tokens to text, against the tokenizers library and against the whole text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.engine.detokenize import TextStream, token_bytes
from tests.fused_decode.small_tokenizers import KINDS, TEXTS, byte_fallback, byte_level, words


def decoded(table: list[bytes], tokens: list[int], *stop: str) -> tuple[list[str], str]:
    """The text that each token releases up to a stop string, and the whole text."""
    stream = TextStream(table, stop)
    parts = []
    for token in tokens:
        parts.append(stream.add(token))
        if stream.stopped:
            break
    return parts, "".join([*parts, stream.end()])


def table_of(tokenizer: Any, folder: Path) -> list[bytes]:
    tokenizer.save(str(folder / "tokenizer.json"))
    return token_bytes(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "unigram"])
def test_text_is_that_of_the_tokenizer(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind]()
    table = table_of(tokenizer, tmp_path)
    assert len(table) == tokenizer.get_vocab_size()
    for text in TEXTS:
        tokens = tokenizer.encode(text).ids
        parts, whole = decoded(table, tokens)
        assert whole.removeprefix(" ") == tokenizer.decode(tokens) == text
        assert len(parts) == len(tokens) and "\ufffd" not in whole


@pytest.mark.parametrize("kind", KINDS)
def test_any_token_has_the_text_that_it_adds_to_another(tmp_path: Path, kind: str) -> None:
    """Added tokens too: what the decoder does to their text, it does."""
    tokenizer = KINDS[kind]()
    table = table_of(tokenizer, tmp_path)
    assert len(table) == max(tokenizer.get_vocab().values()) + 1
    before = next(tokenizer.token_to_id(letter) for letter in ("it", "!") if tokenizer.token_to_id(letter) is not None)
    begun = tokenizer.decode([before])
    for token, own in enumerate(table):
        assert begun + own.decode(errors="replace") == tokenizer.decode([before, token]), tokenizer.id_to_token(token)
    assert decoded(table, [len(table), len(table) + 7])[1] == ""


def test_added_tokens_have_the_bytes_that_the_decoder_makes_of_them(tmp_path: Path) -> None:
    tokenizer = byte_level()
    table = table_of(tokenizer, tmp_path)
    shown = {"<|end|>": b"", "<tool>": b"<tool>", "    ": b"    ", "東京": "東京".encode(), "Ġĉ": b" \t", "õ": b"\xf5"}
    for text, own in shown.items():
        assert table[tokenizer.token_to_id(text)] == own, text
    tokenizer = byte_fallback()
    table = table_of(tokenizer, tmp_path)
    for text, own in {
        "<s>": b"",
        "▁▁▁▁": b"    ",
        "▁" * 8: b" " * 8,
        "<0xE6>": b"\xe6",
        "\ufffd": b"\xef\xbf\xbd",
    }.items():
        assert table[tokenizer.token_to_id(text)] == own, text


def test_any_tokens_give_the_text_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_level()
    table = table_of(tokenizer, tmp_path)
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 12))]
        assert decoded(table, tokens)[1] == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_character_comes_when_its_last_byte_does() -> None:
    table = [bytes([byte]) for byte in range(256)]
    text = "a🙂é"
    parts, whole = decoded(table, list(text.encode()))
    assert parts == ["a", "", "", "", "🙂", "", "é"] and whole == text
    assert decoded(table, list("é".encode()[:1]))[1] == "\ufffd"
    assert decoded(table, [0xFF, ord("b")]) == (["\ufffd", "b"], "\ufffdb")


def test_stop_strings_against_the_whole_text() -> None:
    rng = random.Random(1)
    table = [text.encode() for text in ("a", "b", "ab", "ba", "aab", "é", "")] + [b"\xc3", b"\xa9"]
    met = 0
    for _ in range(3000):
        tokens = [rng.randrange(len(table)) for _ in range(rng.randint(1, 12))]
        stops = ["".join(rng.choice("abé") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        whole = decoded(table, tokens)[1]
        parts, text = decoded(table, tokens, *stops)
        # The first token whose text completes a stop string ends the answer, before that string.
        for count in range(1, len(tokens) + 1):
            seen = b"".join(table[token] for token in tokens[:count]).decode(errors="ignore")
            found = [at for stop in stops if (at := seen.find(stop)) >= 0]
            if found and "\ufffd" not in whole:
                assert (text, len(parts)) == (seen[: min(found)], count)
                met += 1
                break
        else:
            assert "\ufffd" in whole or text == whole
        for count in range(len(parts)):
            released = "".join(parts[: count + 1])
            assert not any(stop in released for stop in stops)
    assert met > 300


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    table = [letter.encode() for letter in "xSTOP"]
    assert decoded(table, [0, 1, 2, 0], "STOP") == (["x", "", "", "STx"], "xSTx")
    assert decoded(table, [0, 1, 2], "STOP") == (["x", "", ""], "xST")
    assert decoded(table, [0, 1, 2, 3, 4], "STOP") == (["x", "", "", "", ""], "x")
    assert decoded(table, [1, 1, 2, 3, 4], "STOP")[1] == "S"


def test_a_decoder_that_changes_what_stands_before_is_refused(tmp_path: Path) -> None:
    from tokenizers import Regex, decoders

    tokenizer = words(decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("^.*(?=ems$)"), "")]))
    with pytest.raises(UnsupportedError, match=r"token 6 \('ems'\) becomes 'ems': .* cannot decode token by token"):
        table_of(tokenizer, tmp_path)
