"""Tokenizers of GGUF files: what each kind, each name of a pre-tokenizer and each type of a token does to texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shapeshift.engines.gguf.pre_tokenizers import PRE_TOKENIZERS
from shapeshift.engines.gguf.tokenizer import tokenizer_files
from shapeshift.engines.text import chat_template_files
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.engine.detokenize import require_texts, text_of, token_bytes
from shapeshift.serving.chat_templates.conversation import ChatTemplate
from tests.engines.gguf_vocabularies import (
    BYTE,
    CONTROL,
    ENDS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_pairs,
    pieces,
)

WORDS = ("1234", "'s", "'S", "aBc", "Ġa", "ĠĠĠ", "ĊĊĊ", ".Ċ", "$$1", "a,b", "aÌģa", "ĠaĊ", "ä¸ĢçĶ²", "a/", "ĊĠ")


def tokenizer_of(metadata: Mapping[str, Any], splits: bool = False) -> Tokenizer:
    """splits: special tokens in texts are text."""
    tokenizer = Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    tokenizer.encode_special_tokens = splits
    return tokenizer


def words_of(pre: str | None, text: str) -> list[str]:
    return list(tokenizer_of(byte_pairs(pre, WORDS)).encode(text, add_special_tokens=False).tokens)


# What tells the rules apart: the tokens of WORDS, and of single letters, into which a text falls.
CUTS: list[tuple[str, str, list[str]]] = [
    ("default", "1234 $$1", ["123", "4", "Ġ", "$$", "1"]),
    ("falcon", "1234 $$1", ["123", "4", "Ġ", "$$", "1"]),
    ("gpt-2", "1234'S's", ["1234", "'", "S", "'s"]),
    ("gpt-2", "$$1 a\n\n   a", ["$$", "1", "Ġa", "ĊĊ", "ĠĠ", "Ġa"]),
    ("smollm", "1234'S's", ["1", "2", "3", "4", "'", "S", "'s"]),
    ("llama-bpe", "1234'S.\n", ["123", "4", "'S", ".Ċ"]),
    ("llama-bpe", "\n \na", ["ĊĠ", "Ċ", "a"]),
    ("qwen2", "1234'S.\na\u0301a", ["1", "2", "3", "4", "'S", ".Ċ", "a", "Ì", "ģ", "a"]),
    ("qwen35", "12a\u0301a", ["1", "2", "aÌģa"]),
    ("tekken", "aBc.\n/", ["a", "B", "c", ".Ċ", "/"]),
    ("gpt-4o", "aBc's1234", ["a", "B", "c", "'s", "123", "4"]),
    ("deepseek-v3", "1234 一甲$$1", ["123", "4", "Ġ", "ä¸ĢçĶ²", "$$", "1"]),
    ("deepseek-llm", "1234 a\n\n一甲", ["1234", "Ġa", "Ċ", "Ċ", "ä¸ĢçĶ²"]),
    ("deepseek-coder", "12 a\n\n一甲", ["1", "2", "Ġa", "Ċ", "Ċ", "ä¸ĢçĶ²"]),
    ("poro-chat", "1234's a,b", ["1234", "'s", "Ġa", ",", "b"]),
    ("viking", "12 a,b", ["1", "2", "Ġa", ",", "b"]),
    ("laguna", "a\n\n\n.\n", ["a", "ĊĊĊ", ".", "Ċ"]),
    ("minicpm5", "1234'S", ["123", "4", "'S"]),
    ("seed-coder", "12.\n", ["1", "2", ".", "Ċ"]),
    ("bailingmoe", "\n\n\na", ["ĊĊĊ", "a"]),
    ("youtu", "a\u0301a's12", ["aÌģa", "'s", "1", "2"]),
]


@pytest.mark.parametrize(("pre", "text", "words"), CUTS)
def test_a_text_falls_into_words_by_the_name_of_the_pre_tokenizer(pre: str, text: str, words: list[str]) -> None:
    assert words_of(pre, text) == words


def test_without_a_name_it_is_the_default_one() -> None:
    assert words_of(None, "1234 $$1") == words_of("default", "1234 $$1") != words_of("gpt-2", "1234 $$1")


@pytest.mark.parametrize("pre", [name for name, cut in PRE_TOKENIZERS.items() if cut.byte_level])
def test_every_byte_level_vocabulary_decodes_to_the_text(pre: str) -> None:
    text = "It's 1234567 % of\n\n  naïve 東京 नमस्ते 👩‍👧\r\n\tab_c(d) \x00\u3000"
    tokenizer = tokenizer_of(byte_pairs(pre, WORDS))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_word_that_is_a_token_is_not_put_together_where_the_name_says_so() -> None:
    for pre, words in (("llama-bpe", ["xyz"]), ("qwen2", ["x", "y", "z"])):
        metadata = byte_pairs(pre, WORDS, ENDS | {"xyz": NORMAL})
        ids = {"bos_token_id": "<s>", "eos_token_id": "</s>"}
        tokens = metadata["tokenizer.ggml.tokens"]
        metadata |= {f"tokenizer.ggml.{key}": tokens.index(token) for key, token in ids.items()}
        assert tokenizer_of(metadata).encode("xyz", add_special_tokens=False).tokens == words


@pytest.mark.parametrize(
    ("pre", "flags", "tokens"),
    [
        ("qwen2", {}, ["a"]),
        ("llama-bpe", {}, ["<s>", "a"]),
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "a", "</s>"]),
    ],
)
def test_texts_get_the_ends_that_the_file_states(pre: str, flags: dict[str, Any], tokens: list[str]) -> None:
    metadata = byte_pairs(pre, WORDS, **flags)
    assert tokenizer_of(metadata).encode("a").tokens == tokens
    config = json.loads(tokenizer_files(metadata)["tokenizer_config.json"])
    assert config["add_bos_token"] == ("<s>" in tokens) and config["add_eos_token"] == ("</s>" in tokens)
    assert (config["bos_token"], config["eos_token"], config["clean_up_tokenization_spaces"]) == ("<s>", "</s>", False)


def test_a_byte_without_a_token_is_dropped_and_parts_what_stands_around_it() -> None:
    metadata = byte_pairs("gpt-2", ["ĠĠ"])
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("ċ")] = "unused"
    assert tokenizer_of(metadata).encode("  \v ").tokens == ["ĠĠ", "Ġ"]


TYPES = ENDS | {"<|tool|>": CONTROL, "<odd>": UNKNOWN, "   ": USER_DEFINED, "ø": USER_DEFINED, "[free]": UNUSED}


def test_types_decide_which_tokens_a_text_may_name() -> None:
    metadata = byte_pairs("gpt-2", WORDS, TYPES, bos_token_id=0, eos_token_id=0)
    text = "<|tool|><odd>a   ø[free]"
    whole, split = (tokenizer_of(metadata, splits).encode(text).tokens for splits in (False, True))
    assert whole == ["<|tool|>", "<odd>", "a", "   ", "ø", *"[free]"]
    assert split == [*"<|tool|><odd>a", "   ", "ø", *"[free]"]
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.decode(tokenizer.encode(text).ids) == "a   ø[free]"


@pytest.mark.parametrize(
    ("added", "special"),
    [
        ({"<|im_end|>": NORMAL}, ["<|im_end|>"]),
        ({"<fim_prefix>": USER_DEFINED}, ["<fim_prefix>"]),
        ({"<|channel|>": CONTROL}, []),
        ({"<|end|>": CONTROL}, ["<|end|>"]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, ["<|return|>", "<|call|>"]),
        ({"</s>": NORMAL, "<|tool_response>": CONTROL}, ["<|tool_response>"]),
    ],
)
def test_well_known_tokens_are_what_their_texts_say(added: dict[str, int], special: list[str]) -> None:
    metadata = byte_pairs("gpt-2", [], added)
    tokens = json.loads(tokenizer_files(metadata)["tokenizer.json"])["added_tokens"]
    assert [token["content"] for token in tokens if token["special"]] == special


def test_tokens_of_a_byte_level_vocabulary_decode_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        tokenizer_files(byte_pairs("gpt-2", WORDS, TYPES, bos_token_id=0, eos_token_id=0))["tokenizer.json"]
    )
    table = token_bytes(tmp_path / "tokenizer.json")
    require_texts(tmp_path / "tokenizer.json", table)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert text_of(table, tokenizer.encode("ø 東   ø").ids) == "ø 東   ø"


# From here on: pieces of SentencePiece.
SPM_ENDS = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
BYTES = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
SPM_WORDS = ("▁ab", "ab", "▁▁", "▁", "a", "b", "\n")


def scored(words: tuple[str, ...] = SPM_WORDS, **further: Any) -> dict[str, Any]:
    return pieces("llama", words, SPM_ENDS | BYTES, **further)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab", ["<s>", "▁ab"]),
        (" ab", ["<s>", "▁", "▁ab"]),
        ("  b", ["<s>", "▁▁", "▁", "b"]),
        ("a\nb", ["<s>", "▁", "a", "\n", "b"]),
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
        ("\t", ["<s>", "▁", "<0x09>"]),
        ("</s>ab", ["<s>", "</s>", "▁ab"]),
        ("", ["<s>"]),
    ],
)
def test_pieces_are_put_together_by_their_scores(text: str, tokens: list[str]) -> None:
    assert tokenizer_of(scored()).encode(text).tokens == tokens


def test_the_score_and_not_the_place_in_the_vocabulary_decides() -> None:
    metadata = scored(("abc", "ab", "bc", "a", "b", "c"), add_space_prefix=False)
    scores = metadata["tokenizer.ggml.scores"]
    assert tokenizer_of(metadata).encode("abbc").tokens == ["<s>", "ab", "bc"]
    place = metadata["tokenizer.ggml.tokens"].index
    scores[place("ab")], scores[place("bc")] = -9.0, -2.0
    assert tokenizer_of(metadata).encode("abc").ids == [1, place("abc")]
    scores[place("abc")] = scores[place("ab")] = -99.0
    assert tokenizer_of(metadata).encode("aabc").tokens == ["<s>", "a", "abc"]


def test_no_space_is_put_before_a_text_where_the_file_says_so() -> None:
    tokenizer = tokenizer_of(scored(add_space_prefix=False))
    assert tokenizer.encode("ab ab</s>ab").tokens == ["<s>", "ab", "▁ab", "</s>", "ab"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_decoding_drops_the_space_that_was_put_before() -> None:
    tokenizer = tokenizer_of(scored())
    for text in ("ab  ab", " é\n", "東 ab"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_phi3_drops_the_spaces_behind_its_special_tokens() -> None:
    metadata = pieces("llama", SPM_WORDS, SPM_ENDS | {"<|user|>": CONTROL} | BYTES)
    assert tokenizer_of(metadata).encode("<|user|>\n ab").tokens[2:] == ["▁", "\n", "▁ab"]
    assert tokenizer_of(metadata | {"general.name": "Phi-3 mini"}).encode("<|user|>\n ab").tokens[2:] == ["▁ab"]


def test_gemma4_writes_spaces_and_bytes_as_sentence_piece_does() -> None:
    tokens = ["<s>", "<0x09>", "▁", "a", "b", "▁a", "ab", "\n", "\n\n"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, BYTE, *[NORMAL] * 7],
        "tokenizer.ggml.merges": ["▁ a", "a b", "\n \n"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    tokenizer = tokenizer_of(metadata)
    text = "ab ab\n\n\ta"
    assert tokenizer.encode(text).tokens == ["<s>", "ab", "▁a", "b", "\n\n", "<0x09>", "a"]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_templates_stand_where_they_are_looked_for(tmp_path: Path) -> None:
    metadata = byte_pairs("gpt-2", WORDS) | {
        "tokenizer.chat_template": "{{ bos_token }}a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
    }
    for name, text in tokenizer_files(metadata).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    files = chat_template_files.read(tmp_path)
    assert (files.text, files.tool_use) == ("{{ bos_token }}a", "b")
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("metadata", [byte_pairs("llama-bpe", WORDS), scored()], ids=["byte pairs", "pieces"])
def test_a_template_that_writes_the_bos_token_too_gives_one(metadata: dict[str, Any], tmp_path: Path) -> None:
    source = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    for name, text in tokenizer_files(metadata | source).items():
        (tmp_path / name).write_text(text)
    files = chat_template_files.read(tmp_path)
    prompt = ChatTemplate(str(files.text), files.special_tokens).render([{"role": "user", "content": "a b"}], None)
    tokenizer = TextTokenizer(tmp_path / "tokenizer.json", 16)
    # The gateway asks for no special tokens around what a template has written.
    ids = tokenizer.encode(prompt.encode(), add_special_tokens=False).tolist()
    bos = metadata.get("tokenizer.ggml.bos_token_id", 1)
    assert ids.count(bos) == 1 and ids == tokenizer.encode(b"a b").tolist()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model: got 'rwkv'; supported: llama, gpt2"),
    "no kind": ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model: got None; supported"),
    "pre-tokenizer": (
        {"tokenizer.ggml.pre": "kimi-k2"},
        "tokenizer.ggml.pre: got 'kimi-k2'; supported: default, falcon",
    ),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens: got None; a list of str"),
    "types": ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type: got '1 entries'; one for each of"),
    "twice": ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens: got 'a'; every token once"),
    "no merges": ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges: got None; a list of str"),
    "a merge": ({"tokenizer.ggml.merges": ["a Q8"]}, "tokenizer.ggml.merges: got 'a Q8'; two tokens that make a token"),
    "no BOS": (
        {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
        "tokenizer.ggml.bos_token_id: got None; the id of the token that texts get",
    ),
    "a path": ({"tokenizer.chat_template.../x": "a"}, "tokenizer.chat_template.*got '../x'; a name of letters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(InvalidInputError, match=message):
        tokenizer_files(byte_pairs("gpt-2", WORDS) | changes)
