"""Tokenizers of a few words, as checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path

from shapeshift.engines.checkpoint import TOKENIZER

WORDPIECE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "##s", "hello", "cafe", "w", "##o"]


def wordpiece(folder: Path) -> None:
    """A tokenizer.json of BERT's kind that leaves the case as it is."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDPIECE)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    made.save(str(folder / TOKENIZER))


def byte_level(folder: Path) -> None:
    """A tokenizer.json of GPT-2's kind with the special tokens <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["hello world hello world"] * 3, trainer)
    made.save(str(folder / TOKENIZER))


def only_vocabulary(folder: Path) -> None:
    """As `byte_level`, in the files of an older tokenizer."""
    byte_level(folder)
    model = json.loads((folder / TOKENIZER).read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    (folder / TOKENIZER).unlink()
