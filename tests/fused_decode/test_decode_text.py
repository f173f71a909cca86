"""Tokens to text, against the tokenizers library and against the whole text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.engine.detokenize import TextStream, token_bytes

TEXTS = ["Return the number of items; der Käse ist größer.", "東京は日本の首都です。 🙂👩‍👩‍👧 \t\n  x", "naïve café ½"]


def byte_level(file: Path) -> Any:
    """A tokenizer like those of GPT-2, Llama 3 and Qwen."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    made.add_special_tokens(["<|end|>"])
    made.add_tokens([AddedToken("<tool>")])
    made.save(str(file))
    return made


def byte_fallback(file: Path) -> Any:
    """A tokenizer like those of Llama 2 and Mistral."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in ("▁", "▁Return", "▁the", "▁▁", "a", "é", "。", "it", "ems"):
        vocabulary[piece] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.save(str(file))
    return made


def decoded(table: list[bytes], tokens: list[int], *stop: str) -> tuple[list[str], str]:
    """The text that each token releases up to a stop string, and the whole text."""
    stream = TextStream(table, stop)
    parts = []
    for token in tokens:
        parts.append(stream.add(token))
        if stream.stopped:
            break
    return parts, "".join([*parts, stream.end()])


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_text_is_that_of_the_tokenizer(tmp_path: Path, kind: Any) -> None:
    tokenizer = kind(tmp_path / "tokenizer.json")
    table = token_bytes(tmp_path / "tokenizer.json")
    assert len(table) == tokenizer.get_vocab_size()
    for text in TEXTS:
        tokens = tokenizer.encode(text).ids
        parts, whole = decoded(table, tokens)
        assert whole.removeprefix(" ") == tokenizer.decode(tokens) == text
        assert len(parts) == len(tokens) and "\ufffd" not in whole


def test_any_tokens_give_the_text_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "tokenizer.json")
    table = token_bytes(tmp_path / "tokenizer.json")
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 12))]
        assert decoded(table, tokens)[1] == tokenizer.decode(tokens, skip_special_tokens=True)


def test_special_tokens_have_no_text_and_added_tokens_have(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "tokenizer.json")
    table = token_bytes(tmp_path / "tokenizer.json")
    assert table[tokenizer.token_to_id("<|end|>")] == b""
    assert table[tokenizer.token_to_id("<tool>")] == b"<tool>"
    assert decoded(table, [len(table), len(table) + 7])[1] == ""


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


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##"}, {"type": "BPEDecoder"}])
def test_a_decoder_that_depends_on_neighbours_is_refused(tmp_path: Path, decoder: object) -> None:
    byte_level(tmp_path / "tokenizer.json")
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    made["decoder"] = decoder
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(UnsupportedError, match="token by token"):
        token_bytes(tmp_path / "tokenizer.json")
