"""The next token of each row: the most likely one, or a random one of those that its filters keep; and logprobs.

Random numbers depend on a seed and a position alone: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Its n-th number
is a function of the seed and n, without a state. So the token of a row does not depend on the other rows, on the time
when its request joined, or on the number of earlier iterations. Logprobs are logarithms of the probabilities that the
model's own logits give, before any parameter changes them.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.fused_decode.engine.sampling.logit_edits import LogitEdits, NumpyLogits, TokenRules
from shapeshift.fused_decode.interfaces import Draws
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.settings import Choices

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

SAMPLERS: Choices[Any] = Choices("sampler", {"torch": "shapeshift.fused_decode.engine.sampling.device:choose"})
"""What samples logits that are not on the CPU, and random tokens where there is no native kernel."""

NO_LOGPROBS = -1
MOST_LISTED = 20
"""Most of the most likely tokens that are listed with a token."""
DEPTH = 64
"""Tokens in a column of the vocabulary: token t is at [t // columns, t % columns]."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


class TokenLogprobs(NamedTuple):
    """One token in its place.

    logprob       of the token
    rank          1 for the most likely token
    top           INT64 [n]    the most likely tokens, most likely first; of equal ones the lower id
    top_logprobs  FLOAT32 [n]
    """

    logprob: float
    rank: int
    top: Integers
    top_logprobs: Floats


class SamplingTable:
    """The sampling parameters of the request in each slot, as arrays over the slots.

    tokens   see `LogitEdits`
    listing  the slots whose requests ask for logprobs
    draws    the arrays for a runtime that chooses tokens itself, `ids` and `finite` among them
    """

    def __init__(self, slots: int, tokens: npt.NDArray[np.int32]) -> None:
        self.edits = LogitEdits(slots, tokens)
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.logprobs = np.full(slots, NO_LOGPROBS, np.int64)
        self.listing: set[int] = set()
        self.ids, self.finite = np.zeros(slots, np.int64), np.zeros(slots, bool)
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed.view(np.int64))
        self.draws = Draws([*map(torch.from_numpy, (*columns, self.ids, self.finite))])

    def set(
        self,
        slot: int,
        params: SamplingParams,
        prompt: int = 0,
        rules: TokenRules | None = None,
        grammar: Any = None,
    ) -> None:
        """Store the parameters of one request; without a seed, it gets a random one.

        prompt: the tokens of its prompt; rules: those of `token_rules`; grammar: that of its answer.
        """
        self.edits.set(slot, params, prompt, rules, grammar)
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.listing.discard(slot) if params.logprobs is None else self.listing.add(slot)
        self.seed[slot] = secrets.randbits(64) if params.seed is None else params.seed % 2**64

    def clear(self, slot: int) -> None:
        """No request is in `slot`."""
        self.edits.clear(slot)
        self.listing.discard(slot)

    def listed(self, slots: Integers) -> Integers:
        """The rows of these slots whose logprobs are asked for."""
        return np.flatnonzero(self.logprobs[slots] != NO_LOGPROBS)


class Chosen(NamedTuple):
    """The next token of each row.

    ids       INT64 [rows]
    finite    BOOL [rows]  whether the row's logits were finite; if not, its token is meaningless
    logprobs  of these tokens, by row, for the rows whose requests ask for them
    """

    ids: Integers
    finite: Flags
    logprobs: dict[int, TokenLogprobs]

    def put(self, rows: Integers, ids: Integers, finite: Flags) -> Chosen:
        """The same as `rows`, INT64 [rows], of rows whose others have the tokens in `ids`; both arrays are changed."""
        ids[rows], finite[rows] = self.ids, self.finite
        return Chosen(ids, finite, {int(rows[row]): one for row, one in self.logprobs.items()})

    @property
    def tokens(self) -> torch.Tensor:
        """See `Choice.tokens`."""
        return torch.from_numpy(self.ids)

    def wait(self) -> None:
        """See `Choice.wait`: it has been made."""

    def result(self) -> Chosen:
        """See `Choice.result`."""
        return self


class Choice(Protocol):
    """Tokens that are being chosen, where the logits lie."""

    @property
    def tokens(self) -> torch.Tensor:
        """INT64 [rows], on the device of the logits: for what is computed there after them."""
        ...

    def wait(self) -> None:
        """Return when they have been chosen, and so all that was given to the device before is done."""
        ...

    def result(self) -> Chosen:
        """What was chosen; waits for it."""
        ...


class Sampler:
    """Chooses tokens. native: False does without the kernel, which exists once the runtime has loaded the kernels."""

    def __init__(self, table: SamplingTable, native: bool = True) -> None:
        self._table = table
        self._draw: Any = getattr(torch.ops.shapeshift_decode, "draw", None) if native else None

    def choose(self, logits: torch.Tensor, slots: Integers, lengths: Integers, *, is_plain: bool = False) -> Choice:
        """The next token of each row. Logits on a device are only read there, without a wait.

        is_plain: whether `SamplingTable.draws` is about these rows

        logits   FLOAT32 [rows, vocab_size], changed by the `LogitEdits`
        slots    INT64 [rows]  the rows' slots; a slot may have several rows
        lengths  INT64 [rows]  the tokens before the chosen ones in these slots: their positions
        """
        table = self._table
        if table.draws.is_done:
            table.draws.is_done = False
            if is_plain:
                return self._completed(logits, slots, lengths)
        is_random = np.count_nonzero(table.temperature[slots]) > 0
        if logits.device.type != "cpu" or (is_random and self._draw is None):
            in_torch: Choice = SAMPLERS["torch"](table, logits, slots, lengths)
            return in_torch
        edited, listing = table.edits.rows(slots), table.listed(slots)
        values = logits.numpy()
        # Before the edits: logprobs are those of the model.
        plain = values[listing] if listing.size else None
        if edited.size:
            table.edits.apply(NumpyLogits(values), edited, slots, lengths)
        ids, finite = self._drawn(logits, slots, lengths) if is_random else _most_likely(values)
        logprobs = {}
        if plain is not None:
            listed = logprobs_of(plain, ids[listing], table.logprobs[slots[listing]])
            logprobs = dict(zip(listing.tolist(), listed, strict=True))
        return Chosen(ids, finite, logprobs)

    def _completed(self, logits: torch.Tensor, slots: Integers, lengths: Integers) -> Chosen:
        """What the runtime chose, but for the rows of which more than that is asked."""
        table = self._table
        ids, finite = table.ids[slots], table.finite[slots]
        if not (table.edits.edited or table.listing):
            return Chosen(ids, finite, {})
        rows = np.union1d(table.edits.rows(slots), table.listed(slots))
        chosen = self.choose(logits[torch.from_numpy(rows)], slots[rows], lengths[rows]).result()
        return chosen.put(rows, ids, finite)

    def _drawn(self, logits: torch.Tensor, slots: Integers, lengths: Integers) -> tuple[Integers, Flags]:
        table = self._table
        columns = (table.temperature, table.top_k, table.top_p, table.min_p)
        values = (*(column[slots] for column in columns), uniforms(table.seed[slots], lengths))
        ids, finite = self._draw(logits, *map(torch.from_numpy, values))
        return ids.numpy(), finite.numpy()


def _most_likely(values: Floats) -> tuple[Integers, Flags]:
    # numpy's argmax takes a fifteenth of the time of torch's argmax.
    ids = values.argmax(axis=1)
    return ids, np.isfinite(values[np.arange(len(ids)), ids])


def uniforms(seeds: Words, positions: Integers) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), with 53 random bits.

    Each seed is mixed first, so that neighbouring seeds give independent numbers.
    """
    starts = splitmix(seeds, np.zeros_like(positions))
    bits = splitmix(starts, positions) >> np.uint64(11)
    return np.asarray(bits * 2.0**-53, dtype=np.float64)


def splitmix(starts: Words, numbers: Integers) -> Words:
    """Output number `numbers` (0, 1, ...) of the generators that begin at `starts`; UINT64 [n]."""
    mixed: Words = starts + (numbers.astype(np.uint64) + np.uint64(1)) * _STEP
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def logprobs_of(logits: Floats, tokens: Integers, listed: Integers) -> list[TokenLogprobs]:
    """What `logits`, [rows, vocab_size], say of `tokens`, INT64 [rows].

    listed: INT64 [rows], how many of the most likely tokens are listed, at most `MOST_LISTED`. A row's result does not
    depend on the other rows.
    """
    rows = np.arange(len(logits))
    scores = logits - logits.max(axis=1, keepdims=True)
    norms = np.log(np.exp(scores).sum(axis=1, dtype=np.float64))
    chosen = scores[rows, tokens]
    ranks = (scores > chosen[:, None]).sum(axis=1) + 1
    count = min(MOST_LISTED, scores.shape[1])
    tops = largest(scores, count) if listed.any() else np.empty((len(rows), 0), np.int64)
    top_scores = np.take_along_axis(scores, tops, axis=1)
    return [
        TokenLogprobs(
            float(chosen[row] - norms[row]),
            int(ranks[row]),
            tops[row, :count],
            (top_scores[row, :count] - norms[row]).astype(np.float32),
        )
        for row, count in enumerate(listed.tolist())
    ]


def largest(values: Floats, count: int) -> Integers:
    """The places of the `count` largest values of each row, INT64 [rows, count], the largest first, of equal ones the
    lower place.

    A row is split into columns. Its largest values are at least the count-th largest of the columns' maxima, and few
    others are. Several times faster than topk of torch.
    """
    rows, size = values.shape
    columns = size // DEPTH
    result = np.empty((rows, count), np.int64)
    floors = np.full(rows, -np.inf, np.float32)
    if count <= columns:
        maxima = values[:, : columns * DEPTH].reshape(rows, DEPTH, columns).max(axis=1)
        floors = np.partition(maxima, columns - count, axis=1)[:, columns - count]
    for row, (scores, floor) in enumerate(zip(values, floors, strict=True)):
        # Not "at least", which NaN never is.
        places = np.flatnonzero(~(scores < floor))
        result[row] = places[np.argsort(-scores[places], kind="stable")[:count]]
    return result
