"""Speculation: proposed tokens, of which the model confirms the first ones in one iteration.

There is no draft model: what followed the last tokens of a text where they occurred before is proposed (prompt lookup
decoding, Saxena, 2023). Texts that summarise, edit or quote their prompts repeat parts of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.engine.batching import leading
from shapeshift.fused_decode.engine.slots import DECODE, SlotTable
from shapeshift.fused_decode.policy.speculation import (
    FIRST_CHANCE,
    IterationTimes,
    can_pay,
    updated_chance,
    verified_tokens,
)
from shapeshift.fused_decode.request import Request

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

SHORTEST, LONGEST = 2, 4
"""Fewest last tokens of a text that must have occurred before, and most that are compared."""


@dataclass(frozen=True)
class _Proposal:
    """Tokens that may follow the first `place` tokens of the text of `request`."""

    request: Request
    place: int
    tokens: Tokens


class Speculator:
    """Proposes tokens for the decoding slots, as many as pay. Only the generating thread uses it.

    Proposals that are not verified cost a look-up, and what is generated instead shows how good they were.

    plain, beside_beams: the times of iterations without beams, and of those with some
    """

    def __init__(
        self, most: int, shortest: int = SHORTEST, longest: int = LONGEST, times: IterationTimes | None = None
    ) -> None:
        """most, shortest, longest: see `look_up`; times: of all this loop's iterations, None: not known yet."""
        self._most, self._shortest, self._longest = most, shortest, longest
        # Beams take time of their own, so that iterations with and without them cannot be compared.
        self.plain, self.beside_beams = times or IterationTimes(), times or IterationTimes()
        self._chances: dict[Request, float] = {}
        self._proposals: list[_Proposal] = []

    def draft(self, table: SlotTable) -> None:
        """Let decoding slots of `table` be followed by proposed tokens in this iteration, where that pays."""
        slots = np.flatnonzero(table.phase == DECODE)
        self._learn(table)
        self._proposals = []
        self._chances = {one: self._chances.get(one, FIRST_CHANCE) for one in table.owners if one is not None}
        times = self.beside_beams if table.is_beam[slots].any() else self.plain
        if not slots.size or not can_pay(len(slots), self._most, times):
            return
        start = time.monotonic()
        self._proposals = self._propose(table, slots)
        chances = [self._chances[proposal.request] for proposal in self._proposals]
        most = [len(proposal.tokens) for proposal in self._proposals]
        counts = verified_tokens(len(slots), chances, most, times.estimate)
        if not any(counts):
            times.waste(time.monotonic() - start)
        for proposal, count in zip(self._proposals, counts, strict=True):
            if count:
                assert proposal.request.slot is not None
                table.draft(proposal.request.slot, proposal.tokens[:count])

    def observe(self, tokens: int, seconds: float, has_beams: bool = False) -> None:
        """An iteration that computed so many tokens, none of a prompt, took so long. has_beams: some were of beams."""
        (self.beside_beams if has_beams else self.plain).observe(tokens, seconds)

    def _propose(self, table: SlotTable, slots: Integers) -> list[_Proposal]:
        # A grammar says what may follow one token, not what may follow several; beams fork.
        # The last token needs no proposal.
        left = table.end[slots] - table.length[slots] - 1
        fitting = [_may_propose(table.owners[slot]) for slot in slots.tolist()]
        slots = slots[fitting & (left > 0)]
        if not slots.size:
            return []
        lengths = table.length[slots]
        followers = look_up(table.tokens[slots, : lengths.max()], lengths, self._most, self._shortest, self._longest)
        proposals = []
        for slot, tokens in zip(slots.tolist(), followers, strict=True):
            request = table.owners[slot]
            assert request is not None
            length = int(table.length[slot])
            if len(tokens):
                proposals.append(_Proposal(request, length, tokens[: int(table.end[slot]) - length - 1]))
        return proposals

    def _learn(self, table: SlotTable) -> None:
        """Compare the last proposals with what was generated."""
        for proposal in self._proposals:
            request = proposal.request
            if request.slot is None:
                continue
            generated = table.tokens[request.slot, proposal.place : table.length[request.slot]][: len(proposal.tokens)]
            chosen = leading(generated == proposal.tokens[: len(generated)])
            chance = self._chances.get(request, FIRST_CHANCE)
            self._chances[request] = updated_chance(chance, chosen, missed=chosen < len(generated))


def _may_propose(request: Request | None) -> bool:
    assert request is not None
    return request.grammar is None and request.beams is None


def look_up(tokens: Tokens, lengths: Integers, most: int, shortest: int, longest: int) -> list[Tokens]:
    """A proposal of at most `most` tokens for each row, empty where there is none.

    tokens    INT32 [rows, width], the texts
    lengths   INT64 [rows], their numbers of tokens, at least 1
    shortest  fewest last tokens of a text that must have occurred before
    longest   most last tokens that are compared

    Of all places the one where most tokens agree is taken. Of equal ones it is the last one that `most` tokens follow,
    or else the first one, which most tokens follow: a text that repeats itself every few tokens is continued so.
    """
    rows = np.arange(len(lengths))
    width = int(lengths.max())
    last = tokens[rows, lengths - 1]
    is_inside = np.arange(width) < (lengths - 1)[:, None]
    row, place = np.nonzero((tokens[:, :width] == last[:, None]) & is_inside)
    agreeing = np.ones(len(row), np.int64)
    left = np.arange(len(row))
    for back in range(1, longest):
        left = left[place[left] >= back]
        left = left[tokens[row[left], place[left] - back] == tokens[row[left], lengths[row[left]] - 1 - back]]
        agreeing[left] += 1
    following = lengths[row] - 1 - place
    order = np.where(following >= most, width + place, width - place)
    ranks = np.where(agreeing >= shortest, agreeing * (2 * width + 1) + order, 0)
    best = np.zeros(len(rows), np.int64)
    np.maximum.at(best, row, ranks)
    proposals = [tokens[0, :0]] * len(rows)
    for match in np.flatnonzero((ranks > 0) & (ranks == best[row])).tolist():
        text, first = row[match], place[match] + 1
        proposals[text] = tokens[text, first : min(first + most, lengths[text])]
    return proposals
