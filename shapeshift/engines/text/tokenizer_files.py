"""The tokenizer that a published model keeps: the checkpoint's, as transformers sets it up, in files of its own.

The library is asked once, when a model is built: it knows what tokenizer_config.json, added tokens and the defaults of
a class change. Serving processes read the result with `tokenizers` alone.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.gguf.tensors import INDEX as GGUF_INDEX
from shapeshift.engines.text.tokenizer import CONFIG, FILE_NAME, PADS, TextTokenizer, open_tokenizer, read_config
from shapeshift.errors import InvalidInputError, UnsupportedError

PUBLISHED = (FILE_NAME, CONFIG)
"""The files that `write` makes; the second one holds chat templates and special tokens too."""
AWKWARD_TEXTS = (
    "a",
    "Hello WORLD, it's 3.14% of 2,026!  Two  spaces\tand\n\nlines\r\n  ",
    " leading and trailing ",
    "I'm don't DON'T we'll l'été",
    "naïve Café CAFE\u0301 ﬁ ﬀ ß ẞ İ ı Σίσυφος",
    "東京は日本の首都です。 中文，测试 한국어 한글",
    "مرحبا بالعالم שלום עולם हिन्दी ไทย",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪 ☕️",
    "def f(x):\n    return x  # comment\n\t\tpass",
    "zero\u200bwidth\u00a0no-break\u3000ideographic\ufeffBOM\u00ad",
    "▁▁ Ġ Ċ <0x0A> ## @@ </w>",
)
"""Scripts, emoji, spaces, casing: on these the published tokenizer must give the ids of the library's."""
_MOST_ADDED = 12
_LONGEST, _TRUNCATED = 8192, 16
"""Tokens of texts that are compared whole, and cut off."""


def key(checkpoint: Checkpoint) -> str:
    """Changes if, and only if, the published tokenizer of a checkpoint must be written again."""
    return f"{checkpoint.tokenizer_sha256}:{version('transformers')}:{version('tokenizers')}"


def of_library(folder: Path, lower_case: bool = False) -> Any:
    """The tokenizer that transformers makes of the checkpoint in `folder`; it never runs the checkpoint's own code.

    lower_case: whether texts become lower case first. Raises InvalidInputError for one that transformers does not read,
    UnsupportedError for one that `tokenizers` does not compute.
    """
    from tokenizers import normalizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()
    # For many families AutoTokenizer has rules of its own, whatever the file says; of GGUF the file has them all.
    library: Any = PreTrainedTokenizerFast if (folder / GGUF_INDEX).is_file() else AutoTokenizer
    try:
        tokenizer = library.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  transformers raises many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        allowed = f"{FILE_NAME}, or files that transformers converts to it ({reason})"
        raise InvalidInputError("checkpoint", str(folder), allowed) from error
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        raise UnsupportedError(
            f"{folder}: the tokenizer {kind} of transformers computes in Python, without {FILE_NAME}"
        )
    if lower_case:
        backend = tokenizer.backend_tokenizer
        steps = [backend.normalizer] if backend.normalizer else []
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
    return tokenizer


def write(folder: Path, target: Path, lower_case: bool = False, pad_to: int = 0) -> Any:
    """Write PUBLISHED into the folder `target`: the tokenizer of the checkpoint in `folder`, which is returned.

    pad_to: the tokens of every text; 0: texts are not padded. Raises as `of_library`, and UnsupportedError for a
    tokenizer that a tokenizer.json cannot express.
    """
    library = of_library(folder, lower_case)
    # Templates go into tokenizer_config.json, all of them.
    library.save_pretrained(str(target), save_jinja_files=False)
    if pad_to:
        _pad(target, library, pad_to)
    _require_equal(TextTokenizer(target / FILE_NAME, _LONGEST), library, folder, pad_to)
    return library


def _pad(target: Path, library: Any, length: int) -> None:
    """Have every text padded as the library does, in the files in `target`."""
    tokenizer, config = open_tokenizer(target / FILE_NAME), read_config(target / FILE_NAME)
    token = {"pad_id": library.pad_token_id, "pad_token": library.pad_token, "direction": library.padding_side}
    tokenizer.enable_padding(length=length, **token)
    tokenizer.save(str(target / FILE_NAME))
    (target / CONFIG).write_text(json.dumps({**config, PADS: True}, indent=1) + "\n", encoding="utf-8")


def require_ids_below(file: Path, ids: int) -> None:
    """Raise InvalidInputError unless `file` is a tokenizer.json whose ids are all below `ids`."""
    highest = highest_id(file)
    if highest >= ids:
        allowed = f"ids below {ids}, the vocab_size of config.json: this is the tokenizer of another model"
        raise InvalidInputError(FILE_NAME, f"id {highest}", f"{allowed}; download the folder again")


def highest_id(file: Path) -> int:
    """The highest id in a tokenizer.json. Raises InvalidInputError if it is none."""
    try:
        tokenizer = open_tokenizer(file)
    except Exception as error:  # noqa: BLE001  the library raises a bare Exception
        raise InvalidInputError("checkpoint", str(file), f"a tokenizer ({error})") from None
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def awkward_texts(library: Any) -> list[str]:
    """AWKWARD_TEXTS, and texts that contain those of added tokens."""
    added = [*library.all_special_tokens, *library.get_added_vocab()]
    named = list(dict.fromkeys(added))[:_MOST_ADDED]
    return [*AWKWARD_TEXTS, *(f"before {token} after{token}" for token in named), " ".join(named) or "a b"]


def _require_equal(tokenizer: TextTokenizer, library: Any, folder: Path, pad_to: int) -> None:
    texts = awkward_texts(library)
    cases: list[tuple[str, str | None]] = [(text, None) for text in texts]
    cases += zip(texts, texts[1:], strict=False)
    padding = "max_length" if pad_to else False
    for tokenizer.max_tokens in (pad_to,) if pad_to else (_LONGEST, _TRUNCATED):
        for first, second in cases:
            options = {"padding": padding, "truncation": True, "max_length": tokenizer.max_tokens}
            expected = library(first, second, **options)["input_ids"]
            pair = None if second is None else second.encode()
            got = tokenizer.encode_with_offsets(first.encode(), pair, truncate=True).ids.tolist()
            if got != expected:
                example = first if second is None else (first, second)
                raise UnsupportedError(
                    f"{folder}: the tokenizer {type(library).__name__} of transformers has more than a {FILE_NAME} can "
                    f"express: {example!r} has the ids {expected}, and {got} by the file"
                )
