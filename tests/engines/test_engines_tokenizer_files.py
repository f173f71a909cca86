"""The tokenizer of a checkpoint as engines keep it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shapeshift.engines.text import tokenizer_files
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.errors import InvalidInputError
from tests.engines.families import VOCABULARY, save_tokenizer

WORDPIECE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "##s"]


def test_the_checkpoints_own_is_copied(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert tokenizer_files.source_files(tmp_path) == ("tokenizer.json",)
    tokenizer_files.write(tmp_path, tmp_path / "copy.json", VOCABULARY)
    assert (tmp_path / "copy.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_a_vocabulary_is_converted(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDPIECE))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert tokenizer_files.source_files(tmp_path) == ("vocab.txt", "tokenizer_config.json")
    tokenizer_files.write(tmp_path, tmp_path / "made.json", len(WORDPIECE))
    assert TextTokenizer(tmp_path / "made.json", 9).encode(b"Words word").tolist() == [2, 5, 6, 5, 3]


def test_a_text_becomes_lower_case_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    for lower_case, ids in ((False, [2, 1, 3]), (True, [2, 5, 3])):
        tokenizer_files.write(tmp_path, tmp_path / "made.json", VOCABULARY, lower_case)
        assert TextTokenizer(tmp_path / "made.json", 9).encode(b"W1").tolist() == ids


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(
        InvalidInputError, match=f"tokenizer.json: got 'id {VOCABULARY - 1}'; ids below 40, the vocab_size"
    ):
        tokenizer_files.write(tmp_path, tmp_path / "made.json", 40)


def test_an_added_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """As an unresized `<pad>`: the embedding has no row for it."""
    save_tokenizer(tmp_path)
    tokenizer = tokenizer_files.read(tmp_path / "tokenizer.json", VOCABULARY)
    tokenizer.add_tokens(["<added>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidInputError, match=f"got 'id {VOCABULARY}'; ids below {VOCABULARY}"):
        tokenizer_files.read(tmp_path / "tokenizer.json", VOCABULARY)


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(
        InvalidInputError, match="checkpoint: .*a tokenizer|checkpoint: .*files that transformers converts"
    ):
        tokenizer_files.write(tmp_path, tmp_path / "made.json", VOCABULARY)
