"""English-like texts of a requested length in tokens, made of common words that are one token in most vocabularies."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

_WORDS = {
    "name": """
        the man|the woman|the child|the teacher|the doctor|the company|the city|the government|the family
        my friend|our team|the student|the writer|the captain|the king|the army|the school|the church
        the market|the police|the river|the old house|the second group|the president|her brother|his mother
        the young king|the whole town|a small village|the committee|the new president|the machine
    """,
    "thing": """
        the book|the letter|a long road|the door|the table|the report|a new plan|the game|the music
        an answer|the question|the film|the garden|a small boat|the window|the train|the old story
        the last page|the water|a clear picture|the problem|the whole record|the machine|the song
        the first word|a better price|the black horse|the weather|the evening paper|the system
    """,
    "acted": """
        found|made|saw|left|took|held|opened|wanted|read|changed|followed|called|lost|bought|used|played
        moved|built|sent|kept|remembered|described|watched|brought|needed|carried|expected|asked about
        talked about|waited for|looked at|thought about|returned with|agreed on
    """,
    "where": """
        in the morning|on the other side|near the station|after the war|before the meeting|at night
        in the north|under the bridge|during the summer|for a long time|without much help|across the field
        at the end of the day|in the second year|from the beginning|behind the wall|over the hill|by hand
        in front of the school|with great care|since last winter|on the first floor|along the coast
    """,
    "link": "and|but|because|while|when|so|before|after|although|until",
    "aside": "however|of course|in fact|at first|for example|later that day|as usual|this time|in the end",
}
_PHRASES = {
    kind: [phrase.strip() for line in text.strip().splitlines() for phrase in line.split("|")]
    for kind, text in _WORDS.items()
}
_SENTENCES = (
    "name acted thing .",
    "name acted thing where .",
    "aside , name acted thing .",
    "where , name acted thing .",
    "name acted thing link name acted thing .",
    "name acted thing where , link name acted thing where .",
)
_ATTEMPTS = 4


class TextMaker:
    """Makes texts from a seeded generator; the same seed and calls give the same texts.

    count: the number of tokens of a text for the served model, including special tokens. Without it, each word and
    each punctuation mark counts as one token, plus two special tokens.
    """

    def __init__(self, rng: np.random.Generator, count: Callable[[str], int] | None = None) -> None:
        self._random = random.Random(int(rng.integers(2**63)))
        self._count = count

    def text(self, tokens: int) -> str:
        """A text of about `tokens` tokens; never more by this maker's count, unless a single word is more."""
        units = self._units(max(1, tokens - 2))
        if self._count is None:
            return _join(units)
        for _ in range(_ATTEMPTS):
            missing = tokens - self._count(_join(units))
            if missing == 0:
                return _join(units)
            units = units + self._units(missing) if missing > 0 else units[: max(1, len(units) + missing)]
        while len(units) > 1 and self._count(_join(units)) > tokens:
            units.pop()
        return _join(units)

    def _units(self, count: int) -> list[str]:
        """`count` words and punctuation marks of new sentences; the last sentence may be incomplete."""
        units: list[str] = []
        while len(units) < count:
            for kind in self._random.choice(_SENTENCES).split():
                phrases = _PHRASES.get(kind)
                units.extend([kind] if phrases is None else self._random.choice(phrases).split())
        return units[:count]


def _join(units: list[str]) -> str:
    """The units as written English: no space before a mark, a capital after a full stop."""
    written: list[str] = []
    new_sentence = True
    for unit in units:
        mark = unit in ".,"
        if written and not mark:
            written.append(" ")
        written.append(unit.capitalize() if new_sentence else unit)
        new_sentence = unit == "."
    return "".join(written)
