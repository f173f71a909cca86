"""Which proposed tokens are worth their verification: expected tokens against the measured time of iterations."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

LEAST_GAIN = 1.05
"""Tokens a second with proposals over those without, below which nothing is verified."""
MOST_SLOWER = 1.03
"""The time that any request waits for a token, over that without proposals: nobody waits for the tokens of others."""
FORGOTTEN_AFTER = 256
"""Iterations after which a time that was not measured again counts as unknown."""
FIRST_CHANCE = 0.5
"""Of a request of which nothing is known: that the model chooses a proposed token."""

_LEAST_CHANCE = 0.1
_WASTE = 0.01
_FEW = 3
_WEIGHT = 1 / 8
_CHANCE_WEIGHT = 0.2


class IterationTimes:
    """The time of an iteration by its number of tokens, learned while the loop runs.

    A size stands for the sizes below it, in steps of at most an eighth. Its time is the mean of the first few
    measurements, afterwards a moving one; a slow iteration counts at most twice as much as the mean before it.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._measured: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._sizes: list[int] = []
        self._observed = 0
        self._wasted_s = 0.0

    @property
    def allow_waste(self) -> bool:
        """Whether look-ups that led to nothing have taken less than a hundredth of the time."""
        return self._wasted_s <= 0

    def waste(self, seconds: float) -> None:
        """A look-up of which nothing was verified took so long."""
        self._wasted_s += seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """An iteration of so many tokens took so long."""
        size = _size(tokens)
        mean = self._means.get(size, seconds)
        count = self._measured[size] = self._measured.get(size, 0) + 1
        self._means[size] = mean + max(_WEIGHT, 1 / count) * (min(seconds, 2 * mean) - mean)
        self._observed += 1
        self._wasted_s = max(self._wasted_s - _WASTE * seconds, 0.0)
        self._last[size] = self._observed
        for old in [one for one, last in self._last.items() if last <= self._observed - FORGOTTEN_AFTER]:
            del self._means[old], self._measured[old], self._last[old]
        if len(self._sizes) != len(self._means) or size not in self._sizes:
            self._sizes = sorted(self._means)

    def knows(self, tokens: int) -> bool:
        """Whether iterations of so many tokens were measured a few times, not long ago."""
        return self._measured.get(_size(tokens), 0) >= _FEW

    def estimate(self, tokens: int) -> float:
        """The time of an iteration of so many tokens, in seconds; at least one size must have been measured.

        Between measured sizes it is interpolated. Beyond them twice as many tokens are said to take no longer, so that
        they are tried, and more of them in proportion.
        """
        sizes = self._sizes
        size = _size(tokens)
        place = bisect.bisect_left(sizes, size)
        if place == len(sizes):
            return self._means[sizes[-1]] * max(1.0, size / (2 * sizes[-1]))
        above = self._means[sizes[place]]
        if sizes[place] == size or place == 0:
            return above
        below, first = self._means[sizes[place - 1]], sizes[place - 1]
        return below + (above - below) * (size - first) / (sizes[place] - first)


def can_pay(rows: int, most: int, times: IterationTimes) -> bool:
    """Whether verifying up to `most` tokens for each of `rows` rows pays if the model chooses all of them.

    False where the time of an iteration without them is not known, or look-ups have cost too much recently.
    """
    if not times.allow_waste or not times.knows(rows):
        return False
    needed = LEAST_GAIN * rows / times.estimate(rows)
    totals = [rows + max(rows * most >> shift, 1) for shift in range(8)]
    return any(total / times.estimate(total) >= needed for total in totals)


def verified_tokens(
    rows: int, chances: Sequence[float], most: Sequence[int], time: Callable[[int], float]
) -> list[int]:
    """How many tokens of each proposal to verify, so that an iteration gives the most tokens a second.

    rows     rows of the iteration, each of which gets a token anyway
    chances  of each proposal: that the model chooses a token of it, if it has chosen those before it
    most     tokens of each proposal
    time     seconds of an iteration by its number of tokens

    A proposal of n tokens gives chance + chance^2 + ... + chance^n tokens (Leviathan et al., 2023, section 3.1). So the
    likeliest tokens of all proposals are taken first. An iteration that takes longer is only worth it where even the
    row that gains least gets its tokens about as fast as without.
    """
    ranked = sorted(
        (
            (chance**number, place)
            for place, (chance, count) in enumerate(zip(chances, most, strict=True))
            for number in range(1, count + 1)
            if chance**number >= _LEAST_CHANCE
        ),
        reverse=True,
    )
    plain_s = time(rows)
    # Tokens of each row, those without proposals last: of what is taken so far, and of all.
    expected, largest = [1.0] * rows, [1.0] * rows
    for chance, place in ranked:
        largest[place] += chance
    slowest_s = MOST_SLOWER * plain_s
    longest_s = slowest_s * min(largest)
    best, best_rate, total = 0, LEAST_GAIN * rows / plain_s, float(rows)
    for count, (chance, place) in enumerate(ranked, 1):
        expected[place] += chance
        total += chance
        taken_s = time(rows + count)
        if taken_s > longest_s:
            break
        if total / taken_s >= best_rate and taken_s <= slowest_s * min(expected):
            best, best_rate = count, total / taken_s
    lengths = [0] * len(most)
    for _, place in ranked[:best]:
        lengths[place] += 1
    return lengths


def updated_chance(chance: float, chosen: int, missed: bool) -> float:
    """The chance of a request's tokens, after the model chose `chosen` proposed ones, and then (`missed`) another."""
    remaining = (1 - _CHANCE_WEIGHT) ** chosen
    chance = 1 - (1 - chance) * remaining
    return chance * (1 - _CHANCE_WEIGHT) if missed else chance


def _size(tokens: int) -> int:
    """The next size that is kept: all up to 16, then eight for each doubling."""
    step = 1 << max((tokens - 1).bit_length() - 4, 0)
    return -(-tokens // step) * step
