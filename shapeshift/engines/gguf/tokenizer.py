"""The tokenizer that the metadata of a GGUF file describes, as files that transformers and `tokenizers` read.

It gives the ids of llama.cpp, special tokens in texts included. What llama.cpp does to tokens by their texts alone, it
does too: see `token_types`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from shapeshift.engines.gguf.pre_tokenizers import DEFAULT, GEMMA4, PRE_TOKENIZERS, PreTokenizer
from shapeshift.engines.text import chat_template_files
from shapeshift.engines.text.tokenizer import CONFIG, FILE_NAME
from shapeshift.errors import InvalidInputError

_KIND, _PRE, _TEMPLATE = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"
_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_SCORES, _MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
_SPACE = "\u2581"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class TokenType(IntEnum):
    """What a token is: the values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL: Final = (TokenType.CONTROL, TokenType.UNKNOWN)
_ADDED: Final = (*_SPECIAL, TokenType.USER_DEFINED)
ENDS: Final = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
        *("</s>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "[e~[", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>"),
        # What stands between the files of a repository, and fills up a gap.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<reponame>", "<REPO>"),
    )
)
"""Tokens that end an answer by their texts alone."""
# These and the marks of code are control tokens, whatever their types say.
_CONTROLS: Final = ENDS | frozenset(
    (
        *(
            "<｜fim▁begin｜>",
            "<｜fim▁hole｜>",
            "<｜fim▁end｜>",
            "▁<PRE>",
            "▁<SUF>",
            "▁<MID>",
            "<PRE>",
            "<SUF>",
            "<MID>",
        ),
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|prefix|>", "<|suffix|>", "<|middle|>"),
        *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<MID>"),
    )
)
_NO_BYTES: Final = frozenset("ÀÁõö÷øùúûüýþÿ")
"""The letters of GPT-2's alphabet for bytes that no UTF-8 text has."""
_SHOWN: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Control tokens that belong to the text of an answer."""
_IDS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
"""The key of each special token's id, behind `tokenizer.ggml.`; the format misspells one."""


class _Built(NamedTuple):
    """A tokenizer of `tokenizers`, and the roles of the tokens that begin and end a text."""

    tokenizer: Any
    first: str | None
    last: str | None


@dataclass(frozen=True)
class _Vocabulary:
    """What every kind reads. ids: of the special tokens by role, such as bos_token."""

    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def scores(self) -> list[float]:
        return [float(score) for score in _list(self.metadata, _SCORES, (int, float), len(self.tokens))]

    def ends(self, tokenizer: Any, add_bos: bool) -> _Built:
        """The tokenizer with the ends that the file states, or else a BOS token where `add_bos`."""
        first = "bos_token" if self.flag("add_bos_token", add_bos) else None
        return _Built(tokenizer, first, "eos_token" if self.flag("add_eos_token", False) else None)

    def token(self, role: str) -> str:
        if role not in self.ids:
            raise InvalidInputError(f"tokenizer.ggml.{_IDS[role]}", None, "the id of the token that texts get")
        return self.tokens[self.ids[role]]


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The contents of tokenizer.json, tokenizer_config.json and the files of chat templates, by name.

    metadata: the values of a GGUF file by key. Raises InvalidInputError for a kind of tokenizer or pre-tokenizer that
    is not supported, and for a vocabulary that contradicts itself.
    """
    kind = metadata.get(_KIND)
    if kind not in _KINDS:
        raise InvalidInputError(_KIND, kind, f"supported: {', '.join(_KINDS)}")
    build, defaults = _KINDS[kind]
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(_list(metadata, _TOKENS, (str,)))]
    last = {token: number for number, token in enumerate(tokens)}
    twice = next((token for number, token in enumerate(tokens) if last[token] != number), None)
    if twice is not None:
        raise InvalidInputError(_TOKENS, twice, "every token once")
    ids = {role: metadata.get(f"tokenizer.ggml.{key}", defaults.get(role)) for role, key in _IDS.items()}
    ids = {role: number for role, number in ids.items() if number is not None and 0 <= number < len(tokens)}
    types = token_types(metadata, tokens)
    vocabulary = _Vocabulary(metadata, tokens, types, ids)
    built = build(vocabulary)
    _add_tokens(built.tokenizer, vocabulary)
    _add_ends(built, vocabulary)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{role: tokens[number] for role, number in ids.items()},
        "add_bos_token": built.first is not None,
        "add_eos_token": built.last is not None,
    }
    files = {FILE_NAME: built.tokenizer.to_str(), CONFIG: json.dumps(config, ensure_ascii=False, indent=2)}
    return files | _templates(metadata)


def token_types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """The type of each token, as llama.cpp corrects them by the tokens' texts."""
    types = (
        list(_list(metadata, _TYPES, (int,), len(tokens))) if _TYPES in metadata else [TokenType.NORMAL] * len(tokens)
    )
    present = set(tokens)
    changed = dict.fromkeys(_CONTROLS, TokenType.CONTROL) | dict.fromkeys(_SHOWN, TokenType.USER_DEFINED)
    if {"<|return|>", "<|call|>"} <= present or ("<|flush|>" in present and present & {"<|call|>", "<|calls|>"}):
        changed["<|end|>"] = TokenType.USER_DEFINED
    if "<|tool_response>" in present:
        changed["</s>"] = TokenType.NORMAL
    return [int(changed.get(token, kind)) for token, kind in zip(tokens, types, strict=True)]


def _byte_pairs(vocabulary: _Vocabulary) -> _Built:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre_tokenizer(vocabulary.metadata)
    words = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges: dict[tuple[str, str], None] = {}
    for text in _list(vocabulary.metadata, _MERGES, (str,)):
        # A part may begin with a space.
        cut = text.find(" ", 1)
        pair = text[:cut], text[cut + 1 :]
        if cut < 0 or not words.keys() >= {*pair, "".join(pair)}:
            raise InvalidInputError(_MERGES, text, "two tokens that make a token together")
        merges[pair] = None
    model = models.BPE(words, list(merges), ignore_merges=pre.ignore_merges, byte_fallback=not pre.byte_level)
    tokenizer = Tokenizer(model)
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.byte_level:
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cuts.append(to_bytes)
        letters = set(pre_tokenizers.ByteLevel.alphabet())
        # A byte without a token is dropped, and what stands around it does not become one token.
        if missing := letters - words.keys() - _NO_BYTES:
            cuts.append(pre_tokenizers.Split(Regex(f"[{re.escape(''.join(sorted(missing)))}]"), "removed"))
        # The decoder takes a token of its letters alone for bytes; such a text is written in them first.
        texts = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in _ADDED]
        texts = [token for token in texts if not token.isascii() and letters.issuperset(token)]
        written = [(token, "".join(word for word, _ in to_bytes.pre_tokenize_str(token))) for token in texts]
        steps = [decoders.Replace(Regex(rf"\A{re.escape(token)}\z"), text) for token, text in written]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.ByteLevel()])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.decoder = _sentence_piece_decoder(strip=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    built = vocabulary.ends(tokenizer, pre.add_bos)
    return built._replace(first="bos_token") if pre.needs_bos else built


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = GEMMA4 if metadata[_KIND] == GEMMA4 else metadata.get(_PRE) or DEFAULT
    if name not in PRE_TOKENIZERS:
        raise InvalidInputError(_PRE, name, f"supported: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _sentence_piece(vocabulary: _Vocabulary) -> _Built:
    """Pieces of SentencePiece, put together by their scores: any two that make a piece may be merged."""
    from tokenizers import Tokenizer, models, normalizers

    words = {token: number for number, token in enumerate(vocabulary.tokens)}
    scores = vocabulary.scores()
    merges = [
        (-scores[number], words[token[:cut]], words[token[cut:]])
        for token, number in words.items()
        for cut in range(1, len(token))
        if token[:cut] in words and token[cut:] in words
    ]
    pairs = [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in sorted(merges)]
    unknown = vocabulary.tokens[vocabulary.ids["unk_token"]] if "unk_token" in vocabulary.ids else None
    tokenizer = Tokenizer(models.BPE(words, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = _sentence_piece_decoder(strip=prefix)
    return vocabulary.ends(tokenizer, add_bos=True)


def _sentence_piece_decoder(strip: bool) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


_KINDS: Final[dict[Any, tuple[Callable[[_Vocabulary], _Built], dict[str, int]]]] = {
    "llama": (_sentence_piece, {"bos_token": 1, "eos_token": 2, "unk_token": 0}),
    "gpt2": (_byte_pairs, {}),
    GEMMA4: (_byte_pairs, {}),
}
"""How each kind is built, and the ids of special tokens where a file states none."""


def _add_tokens(tokenizer: Any, vocabulary: _Vocabulary) -> None:
    """Make tokens of their type what they are in texts: control tokens special, those of users whole but ordinary."""
    from tokenizers import AddedToken

    model = str(vocabulary.metadata.get("general.name", "")).lower()
    phi3 = "phi-3" in model or "phi3" in model
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=kind in _SPECIAL,
                normalized=False,
                rstrip=phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in _ADDED
        ]
    )


def _add_ends(built: _Built, vocabulary: _Vocabulary) -> None:
    from tokenizers.processors import TemplateProcessing

    special = [
        {"id": role, "tokens": [vocabulary.token(role)], "ids": [vocabulary.ids[role]]} for role in built[1:] if role
    ]
    if not special:
        return
    first, last = ((f"{role}:TYPE",) if role else () for role in built[1:])
    one, other = (*first, "$A:TYPE", *last), (*first, "$B:TYPE", *last)
    single, following = (
        [piece.replace("TYPE", number) for piece in pieces] for pieces, number in ((one, "0"), (other, "1"))
    )
    built.tokenizer.post_processor = TemplateProcessing(single, [*single, *following], special)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates in the files of their own in which transformers looks for them."""
    files = {}
    for key, text in metadata.items():
        if key == _TEMPLATE:
            files[chat_template_files.FILE_NAME] = str(text)
        elif key.startswith(f"{_TEMPLATE}."):
            name = key.removeprefix(f"{_TEMPLATE}.")
            if not _TEMPLATE_NAME.fullmatch(name):
                raise InvalidInputError(key, name, "a name of letters, digits, - and _")
            files[f"{chat_template_files.FOLDER}/{name}.jinja"] = str(text)
    return files


def _list(metadata: Mapping[str, Any], key: str, kinds: tuple[type, ...], length: int | None = None) -> list[Any]:
    """The list under `key`, of one entry for each of `length` tokens. Raises InvalidInputError for anything else."""
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
        raise InvalidInputError(key, values, f"a list of {' or '.join(kind.__name__ for kind in kinds)}")
    if length is not None and len(values) < length:
        raise InvalidInputError(key, f"{len(values)} entries", f"one for each of {length} tokens")
    return values[:length]
