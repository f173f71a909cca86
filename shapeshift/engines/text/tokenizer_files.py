"""The tokenizer.json of engines: the checkpoint's own, or converted from the files of an older tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from shapeshift.engines.text.tokenizer import FILE_NAME
from shapeshift.errors import InvalidInputError

# What transformers makes a tokenizer of where there is no tokenizer.json, and the files that say how.
_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tokenizer.model")
_BESIDE = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")


def source_files(folder: Path) -> tuple[str, ...]:
    """The names of the files in `folder` that make its tokenizer; tokenizer.json if there are none."""
    found = [name for name in _VOCABULARIES if (folder / name).is_file()]
    if not found or (folder / FILE_NAME).is_file():
        return (FILE_NAME,)
    return (*found, *(name for name in _BESIDE if (folder / name).is_file()))


def write(folder: Path, target: Path, ids: int, lower_case: bool = False) -> None:
    """Write the tokenizer of the checkpoint in `folder` to the file `target`.

    ids: the number of ids that the model knows; lower_case: whether texts become lower case first.
    Raises InvalidInputError for a tokenizer that transformers cannot convert, or that has further ids.
    """
    from tokenizers import normalizers

    if (folder / FILE_NAME).is_file():
        shutil.copyfile(folder / FILE_NAME, target)
    else:
        _convert(folder, target)
    tokenizer = read(target, ids)
    if lower_case:
        own = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        tokenizer.save(str(target))


def read(file: Path, ids: int) -> Any:
    """The tokenizer in a tokenizer.json. Raises InvalidInputError if it is none, or has ids from `ids` on."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  the library raises a bare Exception
        raise InvalidInputError("checkpoint", str(file), f"a tokenizer ({error})") from None
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= ids:
        allowed = f"ids below {ids}, the vocab_size of config.json: this is the tokenizer of another model"
        raise InvalidInputError(FILE_NAME, f"id {highest}", f"{allowed}; download the folder again")
    return tokenizer


def _convert(folder: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder).backend_tokenizer.save(str(target))
    except Exception as error:  # noqa: BLE001  transformers raises many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        allowed = f"{FILE_NAME}, or files that transformers converts to it ({reason})"
        raise InvalidInputError("checkpoint", str(folder), allowed) from error
