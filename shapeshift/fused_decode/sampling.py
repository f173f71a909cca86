"""The next token of each row: the likeliest, or one drawn from what its filters leave."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.fused_decode.draws import uniforms
from shapeshift.fused_decode.filters import Filters, Floats, draw
from shapeshift.fused_decode.sequence import GenerateParameters

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_DEPTH = 64
"""A vocabulary is looked at in columns of so many tokens."""


class SamplingTable:
    """What the request in each slot asked of the sampling, as arrays over the slots."""

    def __init__(self, slots: int) -> None:
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.penalty = np.ones(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)

    def set(self, slot: int, parameters: GenerateParameters) -> None:
        """Take over the parameters of one request; without a seed, it gets a random one."""
        self.temperature[slot] = parameters.temperature
        self.top_k[slot] = max(parameters.top_k, 0)
        self.top_p[slot] = parameters.top_p
        self.min_p[slot] = parameters.min_p
        self.penalty[slot] = parameters.repetition_penalty
        self.seed[slot] = secrets.randbits(64) if parameters.seed is None else parameters.seed % 2**64

    def move(self, source: int, target: int) -> None:
        """Copy what stands for slot `source` to `target`."""
        for values in (self.temperature, self.top_k, self.top_p, self.min_p, self.penalty, self.seed):
            values[target] = values[source]


class Sampler:
    """Chooses tokens; holds the working memory for it."""

    def __init__(
        self, table: SamplingTable, tokens: npt.NDArray[np.int32], vocabulary: int, native: bool = True
    ) -> None:
        self._table = table
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._work = np.empty((0, _DEPTH, -(-vocabulary // _DEPTH)), np.float32)
        # There once the runtime has loaded the kernels.
        self._kernel: Any = getattr(torch.ops.shapeshift_decode, "draw", None) if native else None

    def choose(self, logits: torch.Tensor, slots: Integers, lengths: Integers) -> tuple[Integers, Flags]:
        """The next token of each row, and whether its logits were finite (otherwise the token means nothing).

        logits FLOAT32 [rows, vocabulary], changed where a penalty applies; slots and lengths INT64 [rows]: the
        rows' slots and the tokens that stand there, so that `lengths` are the positions of the chosen ones.
        """
        table = self._table
        drawing = table.temperature[slots] > 0
        penalised = table.penalty[slots] != 1
        if logits.device.type != "cpu":
            if not drawing.any() and not penalised.any():
                best, ids = (found.cpu().numpy() for found in logits.max(dim=1))
                return ids, np.isfinite(best)
            logits = logits.cpu()
        values = logits.numpy()
        if penalised.any():
            self._penalise(values, np.flatnonzero(penalised), slots, lengths)
        if self._kernel is not None and drawing.any():
            return self._draw_natively(logits, slots, lengths)
        # numpy's argmax takes a fifteenth of the time of torch's.
        ids = values.argmax(axis=1)
        best = values[np.arange(len(ids)), ids]
        good = np.isfinite(best)
        rows = np.flatnonzero(drawing & good)
        if rows.size:
            own = slots[rows]
            scores = self._scores(values if rows.size == len(ids) else values[rows], best[rows], own)
            filters = Filters(table.top_k[own], table.top_p[own], table.min_p[own])
            ids[rows] = draw(scores, filters, uniforms(table.seed[own], lengths[rows]))
        return ids, good

    def _draw_natively(self, logits: torch.Tensor, slots: Integers, lengths: Integers) -> tuple[Integers, Flags]:
        table = self._table
        asked = (table.temperature, table.top_k, table.top_p, table.min_p)
        values = (*(column[slots] for column in asked), uniforms(table.seed[slots], lengths))
        ids, good = self._kernel(logits, *map(torch.from_numpy, values))
        return ids.numpy(), good.numpy()

    def _scores(self, values: Floats, best: Floats, slots: Integers) -> Floats:
        """(logit - best) / temperature, [rows, depth, columns]; token t's stands at [t // columns, t % columns]."""
        rows = len(values)
        if len(self._work) < rows:
            # Places beyond the vocabulary keep this.
            self._work = np.full((rows, *self._work.shape[1:]), -np.inf, np.float32)
        work = self._work[:rows]
        flat = work.reshape(rows, -1)[:, : self._vocabulary]
        np.subtract(values, best[:, None], out=flat)
        np.divide(flat, self._table.temperature[slots][:, None], out=flat)
        return work

    def _penalise(self, values: Floats, rows: Integers, slots: Integers, lengths: Integers) -> None:
        """Divide positive and multiply negative logits of tokens that have occurred (Keskar et al., 2019)."""
        own = slots[rows]
        counts = lengths[rows]
        width = int(counts.max())
        # Places beyond a row's end repeat its first token: written twice, a value stays the same.
        seen = np.where(np.arange(width) < counts[:, None], self._tokens[own, :width], self._tokens[own, :1])
        penalty = self._table.penalty[own][:, None]
        found = values[rows[:, None], seen]
        values[rows[:, None], seen] = np.where(found > 0, found / penalty, found * penalty)
