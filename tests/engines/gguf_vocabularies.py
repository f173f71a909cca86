"""Small vocabularies as the metadata of GGUF files, and the files that llama.cpp's sources bring."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ENDS = {"<s>": CONTROL, "</s>": CONTROL}


def byte_pairs(pre: str | None, words: Iterable[str], added: dict[str, int] = ENDS, **further: Any) -> dict[str, Any]:
    """The letters of GPT-2's alphabet but for those added, and `words` of them, each made from its beginning."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens, merges = sorted({*ByteLevel.alphabet()} - {*added}), []
    for word in words:
        for end in range(2, len(word) + 1):
            merges.append(f"{word[: end - 1]} {word[end - 1]}")
            tokens.append(word[:end])
    return _metadata(
        "gpt2", tokens, added, merges=list(dict.fromkeys(merges)), **further, **({"pre": pre} if pre else {})
    )


def pieces(kind: str, words: Iterable[str], added: dict[str, int], **further: Any) -> dict[str, Any]:
    """Pieces with the scores -1, -2 and so on; those added come first, with a score of 0."""
    tokens = list(words)
    metadata = _metadata(kind, tokens, {}, **further)
    types = [*added.values(), *metadata["tokenizer.ggml.token_type"]]
    scores = [0.0] * len(added) + [-1.0 - number for number in range(len(tokens))]
    return metadata | {
        "tokenizer.ggml.tokens": [*added, *tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
    }


def _metadata(kind: str, tokens: list[str], added: dict[str, int], **further: Any) -> dict[str, Any]:
    tokens = list(dict.fromkeys(tokens))
    ends = {f"{role}_token_id": len(tokens) + number for number, role in enumerate(("bos", "eos")) if added is ENDS}
    return {
        "general.name": "small",
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [*tokens, *added],
        "tokenizer.ggml.token_type": [*(NORMAL for _ in tokens), *added.values()],
        **{f"tokenizer.ggml.{key}": value for key, value in (ends | further).items()},
    }


def read(file: Path) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
