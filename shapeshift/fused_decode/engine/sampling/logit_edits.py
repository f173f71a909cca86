"""What the parameters of a request change in the logits of its next token: grammar, biases and bans, then penalties.

Each row is changed by its own request alone, and a row without such parameters is not touched. The order is vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.settings import Choices

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


GRAMMARS: Choices[Any] = Choices(
    "structured_outputs", {"llguidance": "shapeshift.fused_decode.engine.sampling.grammar:GrammarCompiler"}
)
"""What compiles the grammars of requests, see `grammar.GrammarCompiler`. What it makes are `grammar.Grammar`s."""
Encode = Callable[[str], list[int]]
"""From a text to its tokens."""
_NO_TOKENS: Integers = np.empty(0, np.int64)
_NO_BIASES: Floats = np.empty(0, np.float32)


@dataclass(frozen=True)
class TokenRules:
    """The tokens that one request biases or bans.

    tokens, biases  INT64 and FLOAT32 [n]: what is added to the logits of these tokens, each named once
    sequences       tokens that do not follow one another in the answer: the last one is banned after the others
    ends            INT64 [n]: tokens that are banned before the answer has `min_tokens` tokens
    """

    tokens: Integers = field(default_factory=_NO_TOKENS.copy)
    biases: Floats = field(default_factory=_NO_BIASES.copy)
    sequences: tuple[tuple[int, ...], ...] = ()
    ends: Integers = field(default_factory=_NO_TOKENS.copy)
    min_tokens: int = 0

    def banned(self, answer: npt.NDArray[np.int32]) -> Integers:
        """The tokens that may not follow `answer`, INT32 [tokens]."""
        last = [one[-1] for one in self.sequences if _ends_with(answer, one[:-1])]
        if len(answer) < self.min_tokens:
            return np.concatenate([self.ends, np.array(last, np.int64)])
        return np.array(last, np.int64)


def token_rules(params: SamplingParams, encode: Encode, vocab_size: int, eos_ids: Collection[int]) -> TokenRules | None:
    """The rules that `params` state; None where they state none. vocab_size, eos_ids: see `interfaces.Runtime`.

    encode: see `TextTokenizer.encode_piece`.
    """
    if not (params.logit_bias or params.bad_words or params.min_tokens):
        return None
    return TokenRules(
        np.array([token for token, _ in params.logit_bias], np.int64),
        np.array([bias for _, bias in params.logit_bias], np.float32),
        tuple(ids for word in params.bad_words for ids in _word_ids(word, encode) if max(ids) < vocab_size),
        np.array(sorted({*eos_ids, *params.stop_token_ids}), np.int64),
        params.min_tokens,
    )


def _word_ids(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """The tokens of a word at the beginning of a text, and within it where other tokens of that number stand for it."""
    bare = word.lstrip() or word
    first, within = (tuple(encode(text)) for text in (bare, f" {bare}"))
    is_another = bool(first) and len(first) == len(within) and first[0] != within[0]
    return [ids for ids in (first, *([within] if is_another else [])) if ids]


def _ends_with(answer: npt.NDArray[np.int32], ids: Sequence[int]) -> bool:
    return not ids or answer[-len(ids) :].tolist() == list(ids)


class EditableLogits(Protocol):
    """Logits FLOAT32 [rows, size] where they lie. A place is named by a row and a token, in one call only once."""

    size: int

    def keep(self, row: int, allowed: npt.NDArray[np.bool_]) -> None:
        """Make all tokens of a row impossible but the `allowed`, BOOL [size]."""
        ...

    def forbid(self, rows: Integers, tokens: Integers) -> None:
        """Make the tokens at these places, INT64 [n] each, impossible."""
        ...

    def add(self, rows: Integers, tokens: Integers, amounts: Floats) -> None:
        """Add `amounts`, FLOAT32 [n], at these places, INT64 [n] each."""
        ...

    def penalise(self, rows: Integers, tokens: npt.NDArray[np.int32], penalties: Floats) -> None:
        """Divide positive logits and multiply negative ones of rows INT64 [n] at `tokens` [n, any], a token named
        twice once, by `penalties`, FLOAT32 [n]."""
        ...


class NumpyLogits:
    """See `EditableLogits`: an array."""

    def __init__(self, values: Floats) -> None:
        self.size = values.shape[1]
        self._values = values

    def keep(self, row: int, allowed: npt.NDArray[np.bool_]) -> None:
        # A quarter of the time that an index of flags takes.
        np.copyto(self._values[row], -np.inf, where=~allowed)

    def forbid(self, rows: Integers, tokens: Integers) -> None:
        self._values[rows, tokens] = -np.inf

    def add(self, rows: Integers, tokens: Integers, amounts: Floats) -> None:
        self._values[rows, tokens] += amounts

    def penalise(self, rows: Integers, tokens: npt.NDArray[np.int32], penalties: Floats) -> None:
        places, penalty = rows[:, None], penalties[:, None]
        values = self._values[places, tokens]
        self._values[places, tokens] = np.where(values > 0, values / penalty, values * penalty)


class LogitEdits:
    """The parameters that change logits, as arrays over the slots.

    tokens: INT32 [slots, max_length + 1], prompt and answer of each slot.
    """

    def __init__(self, slots: int, tokens: npt.NDArray[np.int32]) -> None:
        self._tokens = tokens
        self._repetition = np.ones(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)
        self._frequency = np.zeros(slots, np.float32)
        self._prompt = np.zeros(slots, np.int64)
        self._rules: list[TokenRules | None] = [None] * slots
        self._grammars: list[Any] = [None] * slots
        self._is_edited = np.zeros(slots, bool)
        self.edited: set[int] = set()
        """The slots whose logits are changed."""
        self.guided: set[int] = set()
        """Those of them with a grammar."""

    def set(
        self,
        slot: int,
        params: SamplingParams,
        prompt: int,
        rules: TokenRules | None = None,
        grammar: Any = None,
    ) -> None:
        """Store the parameters of one request, whose prompt has `prompt` tokens."""
        self._grammars[slot] = grammar
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._prompt[slot] = prompt
        self._rules[slot] = rules
        counted = params.presence_penalty != 0 or params.frequency_penalty != 0
        is_edited = counted or params.repetition_penalty != 1 or rules is not None or grammar is not None
        self._is_edited[slot] = is_edited
        for slots, has in ((self.edited, is_edited), (self.guided, grammar is not None)):
            slots.add(slot) if has else slots.discard(slot)

    def clear(self, slot: int) -> None:
        """No request is in `slot`."""
        if slot in self.edited:
            self._grammars[slot] = self._rules[slot] = None
            self._is_edited[slot] = False
            self.edited.discard(slot)
            self.guided.discard(slot)

    def rows(self, slots: Integers) -> Integers:
        """The rows of these slots whose logits are to be changed."""
        return np.flatnonzero(self._is_edited[slots]) if self.edited else _NO_TOKENS

    def may_join(self, slots: Integers | Sequence[int]) -> Flags:
        """Which of these slots may be in the next step: the mask of their next token is there, or may come in time."""
        joins = np.ones(len(slots), bool)
        for place, grammar in self._grammars_of(slots):
            joins[place] = grammar.may_join
        return joins

    def are_ready(self, slots: Integers) -> bool:
        """Whether the masks of the next tokens of all these slots are there."""
        return all(grammar.is_ready for _, grammar in self._grammars_of(slots))

    def late(self, slots: Integers) -> Integers:
        """The places of those of these slots, of a step that has ended, whose masks have not come: they sit out."""
        late = []
        for place, grammar in self._grammars_of(slots):
            if not grammar.is_ready:
                grammar.sit_out()
                late.append(place)
        return np.array(late, np.int64)

    def failures(self, now: float) -> list[tuple[int, Exception]]:
        """The slots whose answers cannot go on, in order, and why."""
        failures = ((slot, self._grammars[slot].failure(now)) for slot in sorted(self.guided))
        return [(slot, failure) for slot, failure in failures if failure is not None]

    def apply(self, values: EditableLogits, rows: Integers, slots: Integers, lengths: Integers) -> None:
        """Change `values` at these `rows`.

        slots, lengths  INT64 [all rows]  the rows' slots, and the tokens in them
        """
        for row in rows.tolist():
            grammar = self._grammars[int(slots[row])]
            if grammar is not None and (allowed := grammar.allowed(values.size)) is not None:
                values.keep(row, allowed)
        self._apply_rules(values, rows, slots, lengths)
        edited = slots[rows]
        if (again := np.flatnonzero(self._repetition[edited] != 1)).size:
            self._penalise_repetition(values, rows[again], edited[again], lengths[rows[again]])
        if (counted := np.flatnonzero((self._presence[edited] != 0) | (self._frequency[edited] != 0))).size:
            self._penalise_counts(values, rows[counted], edited[counted], lengths[rows[counted]])

    def _grammars_of(self, slots: Integers | Sequence[int]) -> Iterator[tuple[int, Any]]:
        """The grammars of these slots that have one, by place."""
        if self.guided:
            for place, slot in enumerate(map(int, slots)):
                if slot in self.guided:
                    yield place, self._grammars[slot]

    def _apply_rules(self, values: EditableLogits, rows: Integers, slots: Integers, lengths: Integers) -> None:
        ruled = [(row, slot, rules) for row in rows.tolist() if (rules := self._rules[slot := int(slots[row])])]
        if not ruled:
            return
        places = np.repeat([row for row, _, _ in ruled], [len(rules.tokens) for _, _, rules in ruled])
        biased = np.concatenate([rules.tokens for _, _, rules in ruled])
        values.add(places, biased, np.concatenate([rules.biases for _, _, rules in ruled]))
        for row, slot, rules in ruled:
            if rules.sequences or rules.min_tokens:
                banned = rules.banned(self._tokens[slot, self._prompt[slot] : lengths[row]])
                values.forbid(np.full(len(banned), row), banned)

    def _penalise_repetition(self, values: EditableLogits, rows: Integers, slots: Integers, lengths: Integers) -> None:
        """Divide positive logits and multiply negative logits of tokens that have occurred (Keskar et al., 2019)."""
        width = int(lengths.max())
        # Places beyond a row's end repeat its first token.
        seen = np.where(np.arange(width) < lengths[:, None], self._tokens[slots, :width], self._tokens[slots, :1])
        values.penalise(rows, seen, self._repetition[slots])

    def _penalise_counts(self, values: EditableLogits, rows: Integers, slots: Integers, lengths: Integers) -> None:
        """Subtract the frequency penalty for each occurrence in the answer, and the presence penalty once."""
        places = np.arange(int(lengths.max()))
        inside = (places >= self._prompt[slots][:, None]) & (places < lengths[:, None])
        row, place = np.nonzero(inside)
        keys, counts = np.unique(row * values.size + self._tokens[slots[row], place], return_counts=True)
        row, token = np.divmod(keys, values.size)
        slot = slots[row]
        values.add(rows[row], token, -(self._frequency[slot] * counts.astype(np.float32) + self._presence[slot]))
