"""How byte-pair vocabularies of GGUF files cut texts into words, by the name that a file gives: `tokenizer.ggml.pre`.

Patterns are in the dialect of `tokenizers` (Oniguruma). They cut as llama.cpp does, which in places differs from the
tokenizers that the models were published with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_NUMBER, _NUMBERS, _UP_TO_3 = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
_SHORT = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LINES = r"[^\n]+|\n+"


def _words(
    numbers: str,
    letters: str = r"\p{L}+",
    short: str = f"{_SHORT}|",
    marks: str = "",
    symbol: str = "",
    end: str = r"[\r\n]*",
    spaces: str = _SPACES,
) -> str:
    """Words with one character before them, numbers, and symbols behind a space.

    short: 's and the like; marks, symbol: what no symbol is besides; end: what belongs to the symbols before it
    """
    symbols = rf" ?[^\s\p{{L}}{marks}\p{{N}}{symbol}]+{end}"
    return f"{short}{_BEFORE_WORD}{letters}|{numbers}|{symbols}|{spaces}"


def _camel_case(numbers: str, marks: str = "", short: str = f"(?:{_SHORT})?") -> str:
    """As `_words`; a capital of ASCII begins another word. marks: of which words consist besides letters."""
    first, later = (rf"[\p{{L}}{marks}&&[^{others}]]" for others in ("a-z", "A-Z"))
    letters = f"{first}*{later}+{short}|{_BEFORE_WORD}{first}+{later}*{short}"
    return _words(numbers, letters, short="", end=r"[\r\n/]*")


def _marked(end: str, spaces: str) -> str:
    """Words with their marks, also behind a sign of ASCII; signs. Numbers have been cut out before."""
    words = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{words}| ?[\p{{P}}\p{{S}}]+{end}|{spaces}"


_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _words(_UP_TO_3), _words(_NUMBER)
_WITH_MARKS = r"[\p{L}\p{M}]+"
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_EAST_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&\S]+"
# Letters with case, but for these scripts.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}]]"
)
_ASCII_SIGNS = r"!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002"
_HALVED_SPACES = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_POPULATED = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HANGUL_OR_SIGNS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[!\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    rf"|[\u3105-\u312f]+|{_CHINESE_JAPANESE}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How texts are cut, and what else a file's name of it says.

    patterns: each cuts what the one before has left, around every match
    byte_level: words are written in the alphabet of GPT-2; else spaces become U+2581 and unknown characters <0xXX>
    ignore_merges: a word that is a token is not put together from its parts
    add_bos, needs_bos: texts get a BOS token where the file says nothing of it, or whatever it says
    """

    patterns: tuple[str, ...]
    byte_level: bool = True
    ignore_merges: bool = False
    add_bos: bool = False
    needs_bos: bool = False


def _named(names: str, *patterns: str, ignore_merges: bool = False, add_bos: bool = False) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(patterns, ignore_merges=ignore_merges, add_bos=add_bos))


GEMMA4: Final = "gemma4"
DEFAULT: Final = "default"
PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {
    **_named(DEFAULT, r"[\p{P}$+<=>^~|]+", _GPT2, _NUMBERS, "[0-9]{3}"),
    **_named("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
    **_named("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", _GPT2),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _NUMBER, _GPT2),
    **_named("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral", _LLAMA3, ignore_merges=True, add_bos=True),
    **_named("midm-2.0 lfm2 jina-v5-nano", _LLAMA3, ignore_merges=True, add_bos=True),
    **_named("glm4 glm5", _LLAMA3, ignore_merges=True),
    **_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_named("minicpm5", _UP_TO_3, _words(_NUMBERS), ignore_merges=True),
    **_named("jais-2", _words(_UP_TO_3, spaces=rf"\s*[\r\n]+|{_HALVED_SPACES}|\s")),
    **_named("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    **_named("qwen35", _words(_NUMBER, _WITH_MARKS, marks=r"\p{M}")),
    **_named("laguna", _LINES, _QWEN2),
    **_named("ufakzeka", _words(_NUMBER, short="")),
    **_named("seed-coder", _words(_NUMBER, symbol=r"\r\n", end="")),
    **_named("bailingmoe bailingmoe2 llada-moe", _words(_NUMBER, spaces=r"\s*[\r\n]|\s+(?!\S)|\s+")),
    **_named(
        "exaone-moe",
        _words(_NUMBER, r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", end=r"[\r\n/]?", spaces=r"\s*[\r\n]|\s+(?!\S)|\s+"),
    ),
    **_named("tekken", _camel_case(_NUMBER, short=""), ignore_merges=True, add_bos=True),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _camel_case(_UP_TO_3)),
    **_named("granite-embed-multi-97m", _camel_case(_UP_TO_3, r"\p{M}"), ignore_merges=True),
    **_named(
        "youtu",
        _HANGUL_OR_SIGNS,
        _words(_NUMBER, rf"{_WITH_MARKS}(?:{_SHORT})?", short="", end=r"[\r\n/]*"),
        ignore_merges=True,
    ),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _UP_TO_3, _CHINESE_JAPANESE, _marked(r"[\r\n]*", _SPACES)),
    **_named("spark2_5", _UP_TO_3, _CHINESE_JAPANESE, _marked("", r"[\r\n]|\s+(?!\S)|\s+"), _NUMBER),
    **_named(
        "deepseek-llm", r"[\r\n]", rf"\s?{_CASED}+", rf"\s?[{_ASCII_SIGNS}]+", r"(?<!\s)\s+$", _EAST_ASIAN, _NUMBERS
    ),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _NUMBER),
    **_named("poro-chat bloom gpt3-finnish", _POPULATED),
    **_named("viking", _POPULATED, _NUMBER),
    **dict.fromkeys((GEMMA4, "granite-embed-multi-311m"), PreTokenizer((r"\n+",), byte_level=False, needs_bos=True)),
    "sarvam-moe": PreTokenizer((r"\n+",), byte_level=False),
}
