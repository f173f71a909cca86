"""The next token of each row: the most likely one, or a random one of those that its filters keep.

Random numbers depend on a seed and a position alone: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Its n-th number
is a function of the seed and n, without a state. So the token of a row does not depend on the other rows, on the time
when its request joined, or on the number of earlier iterations.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.fused_decode.engine.sampling.logit_edits import Grammar, LogitEdits, NumpyLogits, TokenRules
from shapeshift.fused_decode.engine.sampling.logprobs import TokenLogprobs, logprobs_of
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.settings import Choices

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

SAMPLERS: Choices[Any] = Choices("sampler", {"numpy": "shapeshift.fused_decode.engine.sampling.filters:sample"})
"""What samples where there is no native kernel, see `filters.sample`."""

ON_DEVICE: Choices[Any] = Choices("sampler", {"torch": "shapeshift.fused_decode.engine.sampling.device.choose:choose"})
"""What samples logits that are not on the CPU, see `device.choose.choose`."""

NO_LOGPROBS = -1
DEPTH = 64
"""Tokens in a column of the vocabulary: token t is at [t // columns, t % columns]."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


class SamplingTable:
    """The sampling parameters of the request in each slot, as arrays over the slots.

    tokens: see `LogitEdits`.
    """

    def __init__(self, slots: int, tokens: npt.NDArray[np.int32]) -> None:
        self.edits = LogitEdits(slots, tokens)
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.logprobs = np.full(slots, NO_LOGPROBS, np.int64)

    def set(
        self,
        slot: int,
        params: SamplingParams,
        prompt: int = 0,
        rules: TokenRules | None = None,
        grammar: Grammar | None = None,
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
        self.seed[slot] = secrets.randbits(64) if params.seed is None else params.seed % 2**64


class Chosen(NamedTuple):
    """The next token of each row.

    ids       INT64 [rows]
    finite    BOOL [rows]  whether the row's logits were finite; if not, its token is meaningless
    logprobs  of these tokens, by row, for the rows whose requests ask for them
    """

    ids: Integers
    finite: Flags
    logprobs: dict[int, TokenLogprobs]

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
    """Chooses tokens; keeps its own working memory."""

    def __init__(self, table: SamplingTable, vocab_size: int, native: bool = True) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._work = np.empty((0, DEPTH, -(-vocab_size // DEPTH)), np.float32)
        # The operator exists once the runtime has loaded the kernels.
        self._kernel: Any = getattr(torch.ops.shapeshift_decode, "draw", None) if native else None
        # Without the kernel: the same in numpy.
        self._sample: Any = SAMPLERS["numpy"] if self._kernel is None else None

    def choose(self, logits: torch.Tensor, slots: Integers, lengths: Integers) -> Choice:
        """The next token of each row. Logits on a device are only read there, without a wait.

        logits   FLOAT32 [rows, vocab_size], changed by the `LogitEdits`
        slots    INT64 [rows]  the rows' slots; a slot may have several rows
        lengths  INT64 [rows]  the tokens before the chosen ones in these slots: their positions
        """
        table = self._table
        if logits.device.type != "cpu":
            on_device: Choice = ON_DEVICE["torch"](table, logits, slots, lengths)
            return on_device
        edited = table.edits.rows(slots)
        listing = np.flatnonzero(table.logprobs[slots] != NO_LOGPROBS)
        values = logits.numpy()
        # Before the edits: logprobs are those of the model.
        plain = values[listing] if listing.size else None
        if edited.size:
            table.edits.apply(NumpyLogits(values), edited, slots, lengths)
        native = self._kernel is not None and np.count_nonzero(table.temperature[slots]) > 0
        ids, finite = (self._draw_natively if native else self._draw)(logits, slots, lengths)
        logprobs = {}
        if plain is not None:
            listed = logprobs_of(plain, ids[listing], table.logprobs[slots[listing]])
            logprobs = dict(zip(listing.tolist(), listed, strict=True))
        return Chosen(ids, finite, logprobs)

    def _draw(self, logits: torch.Tensor, slots: Integers, lengths: Integers) -> tuple[Integers, Flags]:
        table, values = self._table, logits.numpy()
        # numpy's argmax takes a fifteenth of the time of torch's argmax.
        ids = values.argmax(axis=1)
        best = values[np.arange(len(ids)), ids]
        finite = np.isfinite(best)
        rows = np.flatnonzero((table.temperature[slots] > 0) & finite)
        if rows.size:
            row_slots = slots[rows]
            scores = self._scores(values if rows.size == len(ids) else values[rows], best[rows], row_slots)
            filters = (table.top_k[row_slots], table.top_p[row_slots], table.min_p[row_slots])
            ids[rows] = self._sample(scores, *filters, uniforms(table.seed[row_slots], lengths[rows]))
        return ids, finite

    def _draw_natively(self, logits: torch.Tensor, slots: Integers, lengths: Integers) -> tuple[Integers, Flags]:
        table = self._table
        columns = (table.temperature, table.top_k, table.top_p, table.min_p)
        values = (*(column[slots] for column in columns), uniforms(table.seed[slots], lengths))
        ids, finite = self._kernel(logits, *map(torch.from_numpy, values))
        return ids.numpy(), finite.numpy()

    def _scores(self, values: Floats, best: Floats, slots: Integers) -> Floats:
        """(logit - best) / temperature, [rows, depth, columns]; token t is at [t // columns, t % columns]."""
        rows = len(values)
        if len(self._work) < rows:
            # Places beyond the vocabulary keep this value.
            self._work = np.full((rows, *self._work.shape[1:]), -np.inf, np.float32)
        work = self._work[:rows]
        flat = work.reshape(rows, -1)[:, : self._vocab_size]
        np.subtract(values, best[:, None], out=flat)
        np.divide(flat, self._table.temperature[slots][:, None], out=flat)
        return work


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
