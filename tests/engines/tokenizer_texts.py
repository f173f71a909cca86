"""Texts that tokenizers may split differently: many scripts, code, spaces, digits, controls, in any order."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

WORDS = {
    "Latin": "the quick café naïve Straße ŒUVRE Łódź İstanbul ĳ ﬁne ſpiel camelCase SHOUT",
    "with marks": "e\u0301te\u0301 A\u030angstro\u0308m",
    "Greek and Cyrillic": "Σίσυφος ὕβρις Привет МИР ёлка Їжак",
    "CJK": "東京は 日本語の カタカナ ｶﾀｶﾅ 漢字𠮷 繁體字 中文，测试。 한국어 한글 ㄱㄴㄷ 〇〆々",
    "right to left": "مرحبا بالعالم ١٢٣ کتاب שלום עוֹלָם יוֹם ﷽",
    "Indic and South-East Asian": "नमस्ते हिन्दी १२३ বাংলা தமிழ் తెలుగు ไทย สวัสดี ๑๒๓ ខ្មែរ မြန်မာ ລາວ",
    "other scripts": "Հայերեն ქართული አማርኛ ᏣᎳᎩ ᚠᚢᚦ 𐐷𐑉 𝔘𝔫𝔦 ⅷ ½ ² ①",
    "symbols": "€100 £ ¥ © ™ → ≠ ∑ √2 ░▒▓ ♥ ☕️ ¿qué? «guillemets» „Gänsefüßchen“ … — – ′ ‟",
    "emoji": "🙂 👍🏽 👨‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 1️⃣ 🧑🏿‍🚀 🫠",
    "contractions": "I'm you're he'll they've she'd isn't it's I'M YOU'RE HE'LL THEY'VE SHE'D ISN'T "
    "IT'S l'été d’accord 's 'S ''s",
    "code": 'def f(x): return x**2 # a+=b; if(a&&b||!c){} x->y::z <div class="a"> {"k":[1,null]} '
    "$HOME /usr/bin C:\\dir\\n a_b-c.d@e.f #![x] ~`^|",
    "formats": "50% %s {0:>9} {{x}} ${y} \\d+ 2024-02-29T12:00:00Z 3.14 1e-9 0xFF 1,234,567.89 +49-30 192.168.0.1",
    "tokens as text": "<s> </s> <unk> <pad> <|endoftext|> <|im_start|> <|im_end|> <|eot_id|> <|end|> "
    "[CLS] [MASK] [unused1] <0x0A> ▁x Ġx ##x <mask> <fim_prefix>",
}
SPACES = (
    *(" ", "  ", "   ", "     ", " " * 9, " " * 17, " " * 31, "\t", "\t\t", " \t ", "\n", "\n\n", "\n\n\n", "\n" * 7),
    *("\r\n", "\r\n\r\n", "\r", " \n", "\n ", "  \n  ", "\t\n", "\n\t\n"),
    *("\u00a0", "\u3000", "\u2003", "\u2028", "\u0085"),
)
CONTROLS = (
    *("\x00", "\x01", "\x07", "\x1b[0m", "\x7f", "\v", "\f", "\x1c", "\u200b", "\u200d", "\u200e", "\ufeff", "\u00ad"),
    *("\ufffd", "\u0378", "\ue000", "\U000e0041", "\U0010ffff", "\ufdd0", "\u180e", "\u2060"),
)
RUNS = ("-", "=", "*", ".", "a", "ha", "\U0001f642", "東", "!", "/", "0", "▁", "é", "_", "# ", "()", "<|", "  x")


def texts(markers: Sequence[str] = (), count: int = 1200) -> list[str]:
    """At least `count` different texts, the same in each call. markers: special tokens that stand in some of them."""
    words = [word for line in WORDS.values() for word in line.split()]
    numbers = ["7" * length for length in range(1, 14)] + ["1234567890" * 4, "12 345 6", "1a2b33", "٣٤٥٦", "一二三"]
    atoms = [*words, *numbers, *CONTROLS]
    gaps = [*SPACES, "", "", ""]
    lines = ["", *WORDS.values(), *atoms, *SPACES, *(f"a{gap}b" for gap in gaps)]
    lines += [f" {word}" for word in words] + [f"{gap}x{gap}" for gap in SPACES]
    lines += [run * length for run in RUNS for length in (2, 3, 5, 8, 16, 33)]
    lines += [unicodedata.normalize(form, line) for form in ("NFD", "NFKC") for line in WORDS.values()]
    lines += [line.upper() for line in WORDS.values()]
    for marker in markers:
        lines += [marker, marker * 3, marker[:-1], marker[1:]]
        lines += [f"{marker}x", f"x{marker}", f" a {marker} b", f"a\n{marker}\n b"]
    choose = random.Random(0)
    while len(set(lines)) < count + 8 * len(markers):
        pool = [*atoms, *markers]
        lines.append("".join(choose.choice(pool) + choose.choice(gaps) for _ in range(choose.randint(2, 14))))
    return list(dict.fromkeys(lines))
