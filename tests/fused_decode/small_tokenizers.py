"""Small tokenizers of every kind that the tokenizers library reads, by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = ["Return the number of items; der Käse ist größer.", "東京は日本の首都です。 🙂👩‍👩‍👧 \t\n  x", "naïve café ½"]
PIECES = ("▁", "▁Return", "▁the", "▁▁", "a", "é", "。", "it", "ems", "\ufffd")
WORDS = ("hello", "it", "ems", "東京", ".", "n't", "größer")


def byte_level() -> Any:
    """Like those of GPT-2, Llama 3 and Qwen; DeepSeek has an added token that is a byte of the alphabet."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    made.add_special_tokens(["<|end|>"])
    made.add_tokens([AddedToken(text) for text in ("<tool>", "    ", "東京", "Ġĉ", "café\ufffd")])
    made.add_tokens([AddedToken("õ", normalized=False)])
    return made


def byte_fallback() -> Any:
    """Like those of Llama 2 and Mistral; Gemma has added tokens of spaces."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocabulary |= {piece: len(vocabulary) + at for at, piece in enumerate(PIECES)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<s>"])
    made.add_tokens([AddedToken("▁" * count, normalized=False) for count in (4, 8)])
    return made


def unigram() -> Any:
    """Like those that sentencepiece makes by default, with byte fallback."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -12.0) for byte in range(256)), *((one, -5.0) for one in PIECES)]
    made = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = byte_fallback().decoder
    return made


def metaspace() -> Any:
    """Like those of T5 and XLM-R."""
    made = Tokenizer(models.Unigram([("<unk>", 0.0), *((one, -5.0) for one in PIECES)], 0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def words(decoder: Any) -> Any:
    """Of whole words, with a hole in its ids, an added token and a special one."""
    names = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS), *(f"{word}</w>" for word in WORDS)]
    made = Tokenizer(models.WordLevel({name: 2 * number for number, name in enumerate(names)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(["[UNK]"])
    made.add_tokens(["new word"])
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "byte fallback": byte_fallback,
    "unigram": unigram,
    "metaspace": metaspace,
    "word level": lambda: words(None),
    "word pieces": lambda: words(decoders.WordPiece()),
}
OF_NEIGHBOURS: dict[str, Callable[[], Any]] = {
    "ends of words": lambda: words(decoders.BPEDecoder()),
    "one of repeated tokens": lambda: words(decoders.CTC(pad_token="[UNK]")),
}
"""Those whose decoder makes other text of a token where other tokens stand beside it."""
