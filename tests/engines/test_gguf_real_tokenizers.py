"""Real vocabularies in GGUF: the ids and texts are those of llama.cpp, but for what is stated here."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shapeshift.engines.gguf.pre_tokenizers import PRE_TOKENIZERS
from shapeshift.engines.gguf.tokenizer import tokenizer_files
from tests import llama_cpp_source
from tests.engines.gguf_vocabularies import CONTROL, UNKNOWN, USER_DEFINED, read
from tests.engines.tokenizer_texts import texts

pytestmark = pytest.mark.long
pytest.importorskip("gguf")
NAMES = (
    *("aquila", "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("gpt-neox", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
STATED = (
    *(
        "command-r",
        "deepseek-coder",
        "deepseek-llm",
        "falcon",
        "gemma-4",
        "gpt-2",
        "llama-bpe",
        "llama-spm",
    ),
    *("mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
"""Those beside which the archive has texts and ids."""
_MARKERS = 40
Skip = Callable[[str], bool]


def file_of(name: str) -> Path:
    return llama_cpp_source.models() / f"ggml-vocab-{name}.gguf"


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])


def markers(metadata: dict[str, Any]) -> list[str]:
    """The texts of special tokens and those of users, the longest names of long lists left out."""
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    tokens = zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False)
    return [token for token, kind in tokens if kind in (UNKNOWN, CONTROL, USER_DEFINED)][:_MARKERS]


def by_llama_cpp(file: Path, lines: list[str]) -> dict[str, Any]:
    """What llama_cpp_ids.py says of these texts, in the environment that the benchmarks make."""
    python = llama_cpp_source.PROJECT / "build" / "peers" / "llama-cpp" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no llama.cpp in {python.parents[1]}: the benchmarks of fused_decode make it")
    command = [str(python), str(Path(__file__).with_name("llama_cpp_ids.py")), str(file)]
    run = subprocess.run(command, input=json.dumps(lines), capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


@pytest.mark.parametrize("name", STATED)
def test_the_ids_are_those_beside_the_vocabulary(name: str) -> None:
    file = file_of(name)
    lines = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = [[int(token) for token in line.split()] for line in Path(f"{file}.out").read_text().splitlines()]
    tokenizer = tokenizer_of(read(file))
    assert len(ids) > 40
    for line, expected in zip(lines, ids, strict=False):
        assert tokenizer.encode(line, add_special_tokens=False).ids == expected, line


def _other(name: str, tokens: list[str]) -> Skip:
    """Which texts have other ids than in llama.cpp."""
    if name == "phi-3":
        # `tokenizers` drops every kind of space behind a special token, llama.cpp those of ASCII.
        special = "|".join(map(re.escape, tokens))
        return lambda text: bool(re.search(rf"(?:{special})[\t-\r ]*(?![\t-\r ])\s", text))
    return lambda _: False


@pytest.mark.parametrize("name", NAMES)
def test_the_ids_and_texts_are_those_of_llama_cpp(name: str) -> None:
    file = file_of(name)
    metadata = read(file)
    lines = texts(markers(metadata), 1200)
    answer = by_llama_cpp(file, lines)
    tokenizer = tokenizer_of(metadata)
    is_other = _other(name, markers(metadata))
    compared = 0
    modes = ("whole", "inner", "split")
    for mode in modes:
        tokenizer.encode_special_tokens = mode == "split"
        for line, expected in zip(lines, answer[mode], strict=True):
            if not is_other(line):
                compared += 1
                assert tokenizer.encode(line, add_special_tokens=mode == "whole").ids == expected, (mode, line)
    assert compared > 1000 * len(modes)
    _require_texts(tokenizer, metadata, answer)


def _require_texts(tokenizer: Tokenizer, metadata: dict[str, Any], answer: dict[str, Any]) -> None:
    """ids to text. The space that tokenization put before a text is dropped again."""
    kind = metadata["tokenizer.ggml.model"]
    drops = metadata.get("tokenizer.ggml.add_space_prefix", kind == "llama")
    for ids in answer["inner"]:
        text = "".join(answer["pieces"][token] for token in ids).encode("latin-1").decode()
        assert tokenizer.decode(ids) == (text.removeprefix(" ") if drops else text)


# One name for each rule.
RULES = {cut: name for name, cut in reversed(PRE_TOKENIZERS.items()) if cut.byte_level}


@pytest.mark.parametrize("pre", RULES.values())
def test_every_rule_cuts_as_llama_cpp(pre: str, tmp_path: Path) -> None:
    """A vocabulary under another name: what texts fall into is then the rule of that name."""
    metadata = read(file_of("gpt-2"))
    content = file_of("gpt-2").read_bytes()
    (before, after) = (struct.pack("<Q", len(name)) + name.encode() for name in ("gpt-2", pre))
    key = b"tokenizer.ggml.pre" + struct.pack("<I", 8)
    assert content.count(key + before) == 1
    (tmp_path / "renamed.gguf").write_bytes(content.replace(key + before, key + after))
    lines = texts(markers(metadata))
    answer = by_llama_cpp(tmp_path / "renamed.gguf", lines)
    tokenizer = tokenizer_of(metadata | {"tokenizer.ggml.pre": pre})
    for line, expected in zip(lines, answer["whole"], strict=True):
        assert tokenizer.encode(line).ids == expected, line
