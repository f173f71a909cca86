"""Random models as the folders of checkpoints, with a tokenizer whose tokens are the bytes of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.common.output import empty

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PADDING = "<pad>"


def save(model: Any, folder: Path) -> list[int]:
    """Write a model of transformers and its tokenizer; returns the tokens of LETTERS."""
    empty(folder)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A model says any of its tokens: those that no text has get words.
    words = [f"\u0120{number}" for number in range(model.config.vocab_size - len(alphabet) - 1)]
    vocabulary = {name: number for number, name in enumerate([_PADDING, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PADDING).save_pretrained(folder)
    return [vocabulary[letter] for letter in LETTERS]
