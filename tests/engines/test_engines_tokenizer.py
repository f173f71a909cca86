"""The tokenizer with a vocabulary of a few words, and with the demo model's own."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from shapeshift.errors import InvalidInputError
from tests.engines.small_tokenizers import byte_level

WORDS = ["[UNK]", "[CLS]", "[SEP]", "one", "two", "ü"]
UNKNOWN, OPEN, CLOSE, ONE, TWO, UMLAUT = range(6)


def save(folder: Path, template: str | None = "[CLS] $A [SEP]") -> Path:
    """A tokenizer.json with the vocabulary WORDS that wraps each text in `template`."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        special = [(word, WORDS.index(word)) for word in template.split() if word in WORDS]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    # Both must be undone: a tokenizer.json often carries the settings of its training.
    made.enable_padding(length=16)
    made.enable_truncation(max_length=4)
    file = folder / "tokenizer.json"
    made.save(str(file))
    return file


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer(save(tmp_path), max_tokens=6)


def test_encodes_without_padding_or_silent_truncation(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode(b"one two nine", 0, False)
    assert ids.dtype == np.int64
    assert ids.tolist() == [OPEN, ONE, TWO, UNKNOWN, CLOSE]
    assert tokenizer.encode("ü".encode(), 0, False).tolist() == [OPEN, UMLAUT, CLOSE]
    assert tokenizer.encode(b" ", 0, False).tolist() == [OPEN, CLOSE]
    assert tokenizer.vocabulary == len(WORDS)


def test_the_longest_text_is_served_and_one_more_is_not(tokenizer: TextTokenizer) -> None:
    assert len(tokenizer.encode(b"one two one two", 0, False)) == 6
    with pytest.raises(InvalidInputError) as caught:
        tokenizer.encode(b"one two one two one", 3, False)
    assert str(caught.value) == "row 3: TEXT: got '7 tokens'; at most 6 (or truncate=true)"
    assert caught.value.row == 3


def test_truncate_keeps_the_closing_token(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    assert tokenizer.encode(b"one two one two one two", 0, True).tolist() == [OPEN, ONE, TWO, ONE, TWO, CLOSE]
    assert tokenizer.encode(b"one two one two", 0, True).tolist() == [OPEN, ONE, TWO, ONE, TWO, CLOSE]
    without_end = TextTokenizer(save(tmp_path, "[CLS] $A"), max_tokens=3)
    assert without_end.encode(b"one two one", 0, True).tolist() == [OPEN, ONE, TWO]
    plain = TextTokenizer(save(tmp_path, None), max_tokens=2)
    assert plain.encode(b"one two one", 0, True).tolist() == [ONE, TWO]
    # A decoder's only special token, whose vector is the text's.
    only_end = TextTokenizer(save(tmp_path, "$A [SEP]"), max_tokens=3)
    assert only_end.encode(b"one two one", 0, True).tolist() == [ONE, TWO, CLOSE]


def test_a_prompt_is_tokenized_with_the_text_and_has_no_offsets(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    assert tokenizer.encode(b"one", prompt="two two ").tolist() == [OPEN, TWO, TWO, ONE, CLOSE]
    # What the prompt leaves unfinished, the text completes.
    found = tokenizer.encode_with_offsets("ü one".encode(), prompt="two ü tw")
    assert found.ids.tolist() == [OPEN, TWO, UMLAUT, UNKNOWN, ONE, CLOSE]
    assert found.offsets.tolist() == [[-1, -1], [-1, -1], [-1, -1], [0, 2], [3, 6], [-1, -1]]
    with pytest.raises(InvalidInputError, match="TEXT: got ''; at least one character"):
        tokenizer.encode(b"", prompt="two ")


def test_text_without_tokens_is_rejected(tmp_path: Path) -> None:
    plain = TextTokenizer(save(tmp_path, None), max_tokens=2)
    with pytest.raises(InvalidInputError, match=r"row 1: TEXT: .*at least one token"):
        plain.encode(b"  ", 1, False)


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_a_configuration_that_is_none_is_named(content: str, tmp_path: Path) -> None:
    file = save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(InvalidInputError, match="checkpoint: got '.*tokenizer_config.json'; a JSON object"):
        TextTokenizer(file, 2)


@pytest.mark.parametrize("truncate", [False, True])
def test_empty(tokenizer: TextTokenizer, truncate: bool) -> None:
    with pytest.raises(InvalidInputError, match="row 2: TEXT: got ''; at least one character"):
        tokenizer.encode(b"", 2, truncate)


@pytest.mark.parametrize(
    ("text", "byte"),
    [(b"one \xff", 4), (b"\xc3", 0), (b"ab\xed\xa0\x80", 2), (b"\xf0\x9f\x98", 0), (b"a\xc0\xaf", 1), (b"a\x80", 1)],
)
@pytest.mark.parametrize("truncate", [False, True])
def test_invalid_utf8_names_the_byte(tokenizer: TextTokenizer, text: bytes, byte: int, truncate: bool) -> None:
    with pytest.raises(InvalidInputError, match=rf"row 1: TEXT: .*valid UTF-8 \(byte {byte} is not\)"):
        tokenizer.encode(text, 1, truncate)


def test_bytes_are_limited_before_they_are_tokenized(tokenizer: TextTokenizer) -> None:
    limit = tokenizer.max_bytes
    assert limit == 6 * 128
    assert tokenizer.encode(b"x" * limit, 0, False).tolist() == [OPEN, UNKNOWN, CLOSE]
    with pytest.raises(InvalidInputError, match=f"row 0: TEXT: got '{limit + 1} bytes'; at most {limit} bytes"):
        tokenizer.encode(b"x" * (limit + 1), 0, False)
    assert tokenizer.encode(b"x" * (limit + 1), 0, True).tolist() == [OPEN, UNKNOWN, CLOSE]


def test_truncation_inside_a_character_drops_it(tokenizer: TextTokenizer) -> None:
    text = b"one " + b" " * (tokenizer.max_bytes - 5) + "ü two".encode()
    assert tokenizer.encode(text, 0, True).tolist() == [OPEN, ONE, CLOSE]
    for shift in range(4):
        long = b" " * shift + "🙂".encode() * tokenizer.max_bytes
        assert tokenizer.encode(long, 0, True).tolist() == [OPEN, UNKNOWN, CLOSE]


def test_truncated_text_must_be_valid_utf8(tokenizer: TextTokenizer) -> None:
    for text in (b"\xff one " + b"x" * 1000, b"one " * 100 + b"\xff" + b" two" * 100):
        with pytest.raises(InvalidInputError, match="valid UTF-8"):
            tokenizer.encode(text, 0, True)


def test_the_demo_tokenizer(demo_checkpoint: Path) -> None:
    tokenizer = TextTokenizer(demo_checkpoint / "tokenizer.json", max_tokens=512)
    assert tokenizer.vocabulary == 30522
    assert tokenizer.encode(b"Hello, world!", 0, False).tolist() == [101, 7592, 1010, 2088, 999, 102]
    assert len(tokenizer.encode(b"word " * 510, 0, False)) == 512
    with pytest.raises(InvalidInputError, match="513 tokens"):
        tokenizer.encode(b"word " * 511, 0, False)
    cut = tokenizer.encode(b"word " * 9000, 0, True)
    assert len(cut) == 512 and cut[-1] == 102


def test_tokenizer_is_thread_safe(demo_checkpoint: Path) -> None:
    tokenizer = TextTokenizer(demo_checkpoint / "tokenizer.json", max_tokens=512)
    texts = [f"text number {number} of many".encode() * (1 + number % 9) for number in range(200)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda text: tokenizer.encode(text, 0, False).tolist(), texts))
    assert together == [tokenizer.encode(text, 0, False).tolist() for text in texts]


# Offsets and pairs.


def test_offsets_are_bytes(demo_checkpoint: Path) -> None:
    tokenizer = TextTokenizer(demo_checkpoint / FILE_NAME, 64)
    for text in ("Is unbelievable, naïve, 東京 and so on?", "plain ascii text"):
        raw = text.encode()
        ids, offsets = tokenizer.encode_with_offsets(raw)
        np.testing.assert_array_equal(ids, tokenizer.encode(raw))
        assert offsets.dtype == np.int32 and offsets.shape == (len(ids), 2)
        assert offsets[0].tolist() == offsets[-1].tolist() == [-1, -1]
        pieces = [raw[start:end].decode() for start, end in offsets[1:-1]]
        assert "".join(pieces) == text.replace(" ", "")


def test_pairs_have_own_offsets_and_token_types(demo_checkpoint: Path) -> None:
    stride = 30522
    tokenizer = TextTokenizer(demo_checkpoint / FILE_NAME, 64, type_stride=stride)
    first, second = "Où est-il?".encode(), b"He is here"
    ids, offsets = tokenizer.encode_with_offsets(first, second)
    middle = len(tokenizer.encode(first))
    np.testing.assert_array_equal(ids[:middle], tokenizer.encode(first))
    np.testing.assert_array_equal(ids[middle:] - stride, tokenizer.encode(second)[1:])
    assert [tuple(pair) for pair in offsets if pair[0] < 0] == [(-1, -1)] * 3
    assert [second[start:end] for start, end in offsets[middle:-1]] == [b"He", b"is", b"here"]
    with pytest.raises(InvalidInputError, match="TEXT_PAIR"):
        tokenizer.encode_with_offsets(first, b"", 3)


def library_of(folder: Path, kind: str, demo: Path, side: str) -> Any:
    """transformers' tokenizer of a kind, which it has also written into `folder`."""
    from transformers import AutoTokenizer

    source = demo if kind == "bert" else folder / "source"
    if kind == "roberta":
        source.mkdir()
        byte_level(source)
        (source / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    library = AutoTokenizer.from_pretrained(source, truncation_side=side)
    library.save_pretrained(folder)
    return library


@pytest.mark.parametrize(("kind", "side"), [("bert", "right"), ("roberta", "right"), ("bert", "left")])
def test_truncation_and_offsets_are_those_of_transformers(
    kind: str, side: str, demo_checkpoint: Path, tmp_path: Path
) -> None:
    library = library_of(tmp_path, kind, demo_checkpoint, side)
    stride = 100_000
    texts = ["w", "a b", "één x y", "a [SEP] <s> b </s> c d", "x " * 9, "🙂 東京 naïve " * 5, "b " * 40]
    for longest in (12, 13, 40):
        tokenizer = TextTokenizer(tmp_path / FILE_NAME, longest, type_stride=stride)
        limit = {"truncation": True, "max_length": longest, "return_offsets_mapping": True}
        for first, second in [*product(texts, texts), *((text, None) for text in texts)]:
            wanted = library(first, second, **limit, return_token_type_ids=True)
            pair = None if second is None else second.encode()
            ids, offsets = tokenizer.encode_with_offsets(first.encode(), pair, truncate=True)
            assert (ids % stride).tolist() == wanted["input_ids"]
            assert (ids // stride).tolist() == wanted["token_type_ids"]
            assert offsets.tolist() == in_bytes(wanted, first, second or "")
            if second is None:
                assert tokenizer.encode(first.encode(), truncate=True).tolist() == wanted["input_ids"]
    with pytest.raises(InvalidInputError, match=r"TEXT: got '\d+ tokens'; at most 40"):
        tokenizer.encode_with_offsets(b"a " * 40, b"b")
    with pytest.raises(InvalidInputError, match="max_tokens: got 2; at least"):
        TextTokenizer(tmp_path / FILE_NAME, 2).encode(b"a b c", truncate=True)


def in_bytes(encoded: Any, first: str, second: str) -> list[list[int]]:
    """transformers' offsets, which count characters."""
    texts, found = (first, second), []
    for number, (start, end) in zip(encoded.sequence_ids(), encoded["offset_mapping"], strict=True):
        ends = [-1, -1] if number is None else [len(texts[number][:place].encode()) for place in (start, end)]
        found.append(ends)
    return found


def test_a_text_whose_beginning_is_cut_off_is_bounded(demo_checkpoint: Path, tmp_path: Path) -> None:
    library_of(tmp_path, "bert", demo_checkpoint, "left")
    tokenizer = TextTokenizer(tmp_path / FILE_NAME, 8)
    assert len(tokenizer.encode(b"a b " * 256, truncate=True)) == 8
    with pytest.raises(InvalidInputError, match="TEXT: got '1028 bytes'; at most 1024 bytes"):
        tokenizer.encode(b"a b " * 257, truncate=True)


def test_tokenising_leaves_other_threads_running(tokenizer: TextTokenizer) -> None:
    text = b"one " * 50_000
    tokenizer.max_bytes = len(text)
    entered, left = threading.Event(), threading.Event()

    def look() -> bool:
        entered.wait()
        return not left.is_set()

    interval = sys.getswitchinterval()
    # Nobody takes Python's lock from a thread that runs: `look` goes on once a call frees it.
    sys.setswitchinterval(600)
    try:
        with ThreadPoolExecutor(1) as pool:
            looked = pool.submit(look)
            entered.set()
            tokenizer.encode(text, truncate=True)
            left.set()
            assert looked.result()
    finally:
        sys.setswitchinterval(interval)
