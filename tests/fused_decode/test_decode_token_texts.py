"""The text of every token, held against the decoder of the tokenizers library."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.engine.detokenize import require_texts, token_bytes
from tests import llama_cpp_source
from tests.fused_decode.small_tokenizers import KINDS, OF_NEIGHBOURS


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_must_have_its_own_text(tmp_path: Path, kind: str) -> None:
    tokenizer, file = KINDS[kind](), tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    table = token_bytes(file)
    require_texts(file, table)
    token = next(token for token, own in enumerate(table) if own.strip().isalpha())
    right = table[token].decode()
    table[token] = b"at"
    with pytest.raises(UnsupportedError) as raised:
        require_texts(file, table)
    name = tokenizer.id_to_token(token)
    assert str(raised.value).startswith(f"{file}: token {token} ({name!r}) becomes {right!r} behind ")
    assert ", and 'at' elsewhere: " in str(raised.value)


def test_every_byte_must_be_right(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    KINDS["byte fallback"]().save(str(file))
    table = token_bytes(file)
    table[1 + 0xE6] = b"\xe7"
    with pytest.raises(UnsupportedError, match=r"token \d+ \('<0x..>'\)"):
        require_texts(file, table)


@pytest.mark.parametrize("kind", OF_NEIGHBOURS)
def test_a_text_that_depends_on_neighbours_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "tokenizer.json"
    OF_NEIGHBOURS[kind]().save(str(file))
    with pytest.raises(UnsupportedError, match="token by token"):
        require_texts(file, token_bytes(file))


@pytest.mark.long
def test_public_tokenizers_agree_in_every_token(tmp_path: Path) -> None:
    """Those of llama.cpp that transformers reads."""
    pytest.importorskip("gguf")
    folder = llama_cpp_source.models()
    from transformers import AutoTokenizer

    read = set()
    for archive in folder.glob("ggml-vocab-*.gguf"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=archive.name)
        except Exception:  # noqa: BLE001  it reads only some architectures
            continue
        file = tmp_path / archive.stem
        tokenizer.backend_tokenizer.save(str(file))
        require_texts(file, token_bytes(file))
        read.add(archive.stem.removeprefix("ggml-vocab-"))
    assert {"gpt-2", "llama-bpe", "llama-spm", "qwen2", "falcon", "starcoder"} <= read
