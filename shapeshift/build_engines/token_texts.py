"""The text of every token, held against the decoder of the checkpoint's own tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.engine.detokenize import first_token

_TOKENS = 64
_CHARACTERS_IN_PARTS = "Käse, 東京 und 🙂👩‍👧: naïve ½ नमस्ते"


def require_texts(tokenizer_file: Path, table: Sequence[bytes]) -> None:
    """Require that the `token_bytes` of a tokenizer.json make the text that its decoder makes, whatever follows what.

    Each token stands behind another one in a text of many tokens, and one stands twice. Raises UnsupportedError.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    first = first_token(tokenizer)
    begun = tokenizer.decode(first)
    # Libraries differ in how many U+FFFD stand for parts of characters that make none.
    whole = [token for token, own in enumerate(table) if "\ufffd" not in own.decode(errors="replace")]
    random.Random(0).shuffle(whole)
    texts = [[*whole[at : at + 1], *whole[at : at + _TOKENS]] for at in range(0, len(whole), _TOKENS)]
    texts.append(tokenizer.encode(_CHARACTERS_IN_PARTS, add_special_tokens=False).ids)

    def made(tokens: Sequence[int]) -> str:
        return begun + b"".join(table[token] for token in tokens).decode(errors="replace")

    for tokens, text in zip(texts, tokenizer.decode_batch([first + tokens for tokens in texts]), strict=True):
        if text == made(tokens):
            continue
        for end, token in enumerate(tokens, 1):
            said, own, at = tokenizer.decode(first + tokens[:end]), made(tokens[:end]), len(made(tokens[: end - 1]))
            if said != own:
                raise UnsupportedError(
                    f"{tokenizer_file}: token {token} ({tokenizer.id_to_token(token)!r}) becomes {said[at:]!r} behind "
                    f"{own[:at][-20:]!r}, and {own[at:]!r} elsewhere: its decoder cannot decode token by token; use a "
                    "byte-level tokenizer"
                )
