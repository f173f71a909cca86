"""The tokenizer that a published model keeps, compared with transformers' of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shapeshift.engines.checkpoint import TOKENIZER
from shapeshift.engines.text import chat_template_files, tokenizer_files
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.errors import InvalidInputError, UnsupportedError
from tests.engines.families import VOCABULARY, save_tokenizer
from tests.engines.small_tokenizers import WORDPIECE, byte_level, only_vocabulary, wordpiece

TEXTS = ["hello world", " Hello  WORD Café words", "a <s> b </s> <|start|> c [SEP] <image> <extra>", "東京 🙂"]
GENERIC = "PreTrainedTokenizerFast"


Files = Mapping[str, Any]
GPT = {"tokenizer_class": "GPT2Tokenizer"}
_ADDED = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
BESIDE: dict[str, tuple[Callable[[Path], None], str, Files]] = {
    "added_tokens.json": (byte_level, GENERIC, {"added_tokens.json": {"<|start|>": 300, "<extra>": 301}}),
    "added_tokens_decoder": (
        byte_level,
        GENERIC,
        {"tokenizer_config.json": {"added_tokens_decoder": {"300": {"content": "<|start|>", **_ADDED}}}},
    ),
    "extra_special_tokens": (
        byte_level,
        GENERIC,
        {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}}},
    ),
    "additional_special_tokens": (
        byte_level,
        GENERIC,
        {"tokenizer_config.json": {"additional_special_tokens": ["<extra>"]}},
    ),
    "a special token in no vocabulary": (byte_level, GENERIC, {"tokenizer_config.json": {"pad_token": "<|start|>"}}),
    "special_tokens_map.json": (byte_level, GENERIC, {"special_tokens_map.json": {"cls_token": "<|start|>"}}),
    "split_special_tokens": (byte_level, GENERIC, {"tokenizer_config.json": {"split_special_tokens": True}}),
    "add_prefix_space": (byte_level, "GPT2Tokenizer", {"tokenizer_config.json": {"add_prefix_space": True}}),
    "add_bos_token": (only_vocabulary, "GPT2Tokenizer", {"tokenizer_config.json": {"add_bos_token": True}}),
    "do_lower_case": (wordpiece, "BertTokenizer", {"tokenizer_config.json": {"do_lower_case": True}}),
    "the defaults of a class": (wordpiece, "", {"config.json": {"model_type": "bert"}}),
}


@pytest.mark.parametrize("case", BESIDE)
def test_files_beside_count_as_in_transformers(case: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    make, kind, beside = BESIDE[case]
    make(tmp_path)
    files = {"config.json": {"model_type": "gpt2"}, "tokenizer_config.json": {}, **beside}
    if kind:
        files["tokenizer_config.json"] = {"tokenizer_class": kind, **files["tokenizer_config.json"]}
    for name, content in files.items():
        if content:
            (tmp_path / name).write_text(json.dumps(content))
    library = AutoTokenizer.from_pretrained(tmp_path)
    wanted = [library(text)["input_ids"] for text in TEXTS]
    if (tmp_path / TOKENIZER).is_file():
        plain = Tokenizer.from_file(str(tmp_path / TOKENIZER))
        assert [plain.encode(text).ids for text in TEXTS] != wanted, "they change something"
    target = tmp_path / "published"
    tokenizer_files.write(tmp_path, target)
    assert sorted(file.name for file in target.iterdir()) == sorted(tokenizer_files.PUBLISHED)
    published = TextTokenizer(target / TOKENIZER, 512)
    assert [published.encode(text.encode()).tolist() for text in TEXTS] == wanted
    assert [published.encode_with_offsets(text.encode()).ids.tolist() for text in TEXTS] == wanted
    assert chat_template_files.read(target).special_tokens == library.special_tokens_map


@pytest.mark.parametrize("templates", [{"default": "a {{ bos_token }}\n"}, {"default": "a", "tool_use": "b"}])
@pytest.mark.parametrize("as_files", [True, False])
def test_chat_templates_are_those_of_transformers(templates: dict[str, str], as_files: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    byte_level(tmp_path)
    config: dict[str, Any] = {"tokenizer_class": GENERIC, "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    if as_files:
        (tmp_path / "chat_template.jinja").write_text(templates["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        for name in templates.keys() - {"default"}:
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(templates[name])
    else:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer_files.write(tmp_path, tmp_path / "published")
    library = AutoTokenizer.from_pretrained(tmp_path)
    stated = library.chat_template if isinstance(library.chat_template, dict) else {"default": library.chat_template}
    assert stated == templates
    for folder in (tmp_path, tmp_path / "published"):
        found = chat_template_files.read(folder)
        assert (found.text, found.tool_use) == (templates["default"], templates.get("tool_use"))
        assert found.special_tokens == library.special_tokens_map == {"eos_token": "</s>"}


def test_the_ends_of_a_checkpoint_without_special_files_stay(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer_files.write(tmp_path, tmp_path / "made")
    assert TextTokenizer(tmp_path / "made" / TOKENIZER, 9).encode(b"w1").tolist() == [2, 5, 3]


def test_a_vocabulary_is_converted(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDPIECE))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    tokenizer_files.write(tmp_path, tmp_path / "made")
    assert TextTokenizer(tmp_path / "made" / TOKENIZER, 9).encode(b"Words word").tolist() == [2, 5, 6, 5, 3]


def test_a_text_becomes_lower_case_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    for lower_case, ids in ((False, [2, 1, 3]), (True, [2, 5, 3])):
        tokenizer_files.write(tmp_path, tmp_path / "made", lower_case)
        assert TextTokenizer(tmp_path / "made" / TOKENIZER, 9).encode(b"W1").tolist() == ids


def test_what_a_file_cannot_express_is_refused_with_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a class that changes texts in Python before it encodes them."""
    from transformers import PreTrainedTokenizerFast

    save_tokenizer(tmp_path)
    plain = PreTrainedTokenizerFast._encode_plus

    def changed(self: Any, text: str, *given: Any, **named: Any) -> Any:
        return plain(self, text.replace("🙂", "w1"), *given, **named)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", changed)
    with pytest.raises(UnsupportedError, match="more than a tokenizer.json can express: '🙂.*' has the ids"):
        tokenizer_files.write(tmp_path, tmp_path / "made")


def test_a_tokenizer_in_python_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "a</w>": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ctrl"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    with pytest.raises(UnsupportedError, match="the tokenizer CTRLTokenizer of transformers computes in Python"):
        tokenizer_files.write(tmp_path, tmp_path / "made")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer_files.require_ids_below(tmp_path / TOKENIZER, VOCABULARY)
    with pytest.raises(
        InvalidInputError, match=f"tokenizer.json: got 'id {VOCABULARY - 1}'; ids below 40, the vocab_size"
    ):
        tokenizer_files.require_ids_below(tmp_path / TOKENIZER, 40)


def test_an_added_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """As an unresized `<pad>` in tokenizer.json: the embedding has no row for it."""
    from tokenizers import Tokenizer

    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / TOKENIZER))
    tokenizer.add_tokens(["<added>"])
    tokenizer.save(str(tmp_path / TOKENIZER))
    with pytest.raises(InvalidInputError, match=f"got 'id {VOCABULARY}'; ids below {VOCABULARY}"):
        tokenizer_files.require_ids_below(tmp_path / TOKENIZER, VOCABULARY)


@pytest.mark.parametrize("name", [TOKENIZER, "spiece.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(InvalidInputError, match="checkpoint: .*files that transformers converts"):
        tokenizer_files.write(tmp_path, tmp_path / "made")
