"""Tokens and logprobs where the logits lie: in operations of torch that never wait for a device.

Without the kernels, random tokens of a CPU are chosen here too. A GPU sorts a vocabulary faster than it makes a
shortlist, as `kernels/decode.cpp` does. Tokens of equal weight are kept or dropped together, and the order in which
tokens share the interval of a draw is that of the kernel: a seed gives the same token there and here, but where
rounding decides between two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from shapeshift.fused_decode.engine.sampling.logit_edits import Floats
from shapeshift.fused_decode.engine.sampling.sampler import (
    DEPTH,
    MOST_LISTED,
    Chosen,
    Integers,
    SamplingTable,
    TokenLogprobs,
    uniforms,
)

_LEAST_WEIGHT = 1e-37


class DeviceChoice:
    """See `sampler.Choice`: tokens on their way from the device."""

    def __init__(
        self, tokens: torch.Tensor, finite: torch.Tensor, listing: Integers, listed: ListedLogprobs | None
    ) -> None:
        """finite: BOOL [rows]; listing: the rows whose logprobs are `listed`."""
        self.tokens = tokens
        self._listing = listing
        self._listed = listed
        # From a GPU into page-locked memory, which torch takes for copies that are not waited for.
        self._both = torch.stack([tokens, finite.long()]).to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def result(self) -> Chosen:
        self.wait()
        ids, finite = self._both.numpy()
        logprobs = {} if self._listed is None else dict(zip(self._listing.tolist(), self._listed.result(), strict=True))
        return Chosen(ids, finite.astype(bool), logprobs)


@torch.inference_mode()
def choose(table: SamplingTable, logits: torch.Tensor, slots: Integers, lengths: Integers) -> DeviceChoice:
    """See `sampler.Sampler.choose`."""
    listing = table.listed(slots)
    # Before the edits: logprobs are those of the model.
    plain = logits[moved(listing, logits)] if listing.size else None
    edited = table.edits.rows(slots)
    if edited.size:
        table.edits.apply(DeviceLogits(logits), edited, slots, lengths)
    best, ids = logits.max(dim=1)
    finite = best.isfinite()
    random = np.flatnonzero(table.temperature[slots] > 0)
    if random.size:
        rows = moved(random, logits)
        drawn = _drawn(table, logits[rows], best[rows], slots[random], lengths[random])
        ids[rows] = torch.where(finite[rows], drawn, ids[rows])
    listed = None
    if plain is not None:
        listed = list_logprobs(plain, ids[moved(listing, logits)], table.logprobs[slots[listing]])
    return DeviceChoice(ids, finite, listing, listed)


def _drawn(
    table: SamplingTable, values: torch.Tensor, best: torch.Tensor, slots: Integers, lengths: Integers
) -> torch.Tensor:
    """A random token of each row, INT64 [rows]; meaningless where the row is not finite."""
    top_k, top_p, min_p = table.top_k[slots], table.top_p[slots], table.min_p[slots]
    scores = (values - best[:, None]) / moved(table.temperature[slots], values)[:, None]
    return draw(
        scores,
        moved(top_k, values) if top_k.any() else None,
        moved(top_p, values) if (top_p < 1).any() else None,
        moved(min_p, values) if min_p.any() else None,
        moved(uniforms(table.seed[slots], lengths), values),
    )


# Random tokens, from those that min_p, top_k and top_p keep, in this order.


def draw(
    scores: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """One token for each row, drawn from those that its filters keep; INT64 [rows].

    scores    FLOAT32 [rows, vocab_size], changed; a token's weight is exp(score), the most likely one has score 0
    top_k  INT64 [rows]    keep this many tokens; 0: all
    top_p  FLOAT32 [rows]  keep the most likely tokens with this share of the weight that is left; 1: all
    min_p  FLOAT32 [rows]  keep tokens with at least this share of the most likely one's weight; 0: all
    uniforms  FLOAT64 [rows] in [0, 1)

    A filter is None where no row has it.
    """
    if min_p is not None:
        scores.masked_fill_(scores < min_p.clamp(min=_LEAST_WEIGHT).log()[:, None], float("-inf"))
    if top_k is not None or top_p is not None:
        scores.masked_fill_(scores < _floors(scores, top_k, top_p)[:, None], float("-inf"))
    columns = -(-scores.shape[1] // DEPTH)
    weights = functional.pad(scores.exp(), (0, DEPTH * columns - scores.shape[1]))
    upto = weights.view(-1, DEPTH, columns).transpose(1, 2).flatten(1).cumsum(1, dtype=torch.float64)
    total = upto[:, -1:].contiguous()
    # Rounding may put the draw beyond the end; then the last token with any weight is chosen.
    last = torch.searchsorted(upto, total)
    place = torch.minimum(torch.searchsorted(upto, uniforms[:, None] * total, right=True), last)[:, 0]
    return place % DEPTH * columns + place // DEPTH


def _floors(scores: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """The lowest score that the filters of each row keep, [rows]."""
    ordered = scores.sort(dim=1, descending=True).values
    floors = torch.full_like(scores[:, 0], float("-inf"))
    if top_k is not None:
        counts = (top_k.clamp(max=scores.shape[1]) - 1).clamp(min=0)
        floors = torch.where(top_k > 0, ordered.gather(1, counts[:, None])[:, 0], floors)
    if top_p is not None:
        weights = ordered.exp().masked_fill(ordered < floors[:, None], 0.0)
        upto = weights.cumsum(1, dtype=torch.float64)
        last = torch.searchsorted(upto, upto[:, -1:] * top_p.double()[:, None])
        reached = ordered.gather(1, last.clamp(max=scores.shape[1] - 1))[:, 0]
        floors = torch.where(top_p < 1, reached, floors)
    return floors


# What the parameters of a request change.


class DeviceLogits:
    """See `logit_edits.EditableLogits`: a tensor. What is changed is computed on the CPU; the logits stay."""

    def __init__(self, values: torch.Tensor) -> None:
        self.size = values.shape[1]
        self._values = values

    def keep(self, row: int, allowed: npt.NDArray[np.bool_]) -> None:
        self._values[row].masked_fill_(~moved(allowed, self._values), float("-inf"))

    def forbid(self, rows: Integers, tokens: Integers) -> None:
        self._values[moved(rows, self._values), moved(tokens, self._values)] = float("-inf")

    def add(self, rows: Integers, tokens: Integers, amounts: Floats) -> None:
        self._values[moved(rows, self._values), moved(tokens, self._values)] += moved(amounts, self._values)

    def penalise(self, rows: Integers, tokens: npt.NDArray[np.int32], penalties: Floats) -> None:
        places, named = moved(rows, self._values)[:, None], moved(tokens, self._values).long()
        scores, penalty = self._values[places, named], moved(penalties, self._values)[:, None]
        self._values[places, named] = torch.where(scores > 0, scores / penalty, scores * penalty)


def moved(array: npt.NDArray[Any], beside: torch.Tensor) -> torch.Tensor:
    """`array` as a tensor on the device of `beside`. A GPU is not waited for: the copy is of page-locked memory."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if beside.is_cuda else tensor).to(beside.device, non_blocking=True)


# Logprobs.


class ListedLogprobs:
    """Logprobs on their way from the device; those of a GPU may be read once it has come so far."""

    def __init__(self, values: torch.Tensor, numbers: torch.Tensor, listed: Integers) -> None:
        """values, numbers: FLOAT64 and INT64 [rows, 1 + n]: a token's logprob and rank, then the top's and ids."""
        self._values = values.to("cpu", non_blocking=True)
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._listed = listed

    def result(self) -> list[TokenLogprobs]:
        """One for each row."""
        values, whole = self._values.numpy(), self._numbers.numpy()
        return [
            TokenLogprobs(
                float(values[row, 0]),
                int(whole[row, 0]),
                whole[row, 1 : 1 + count],
                values[row, 1 : 1 + count].astype("float32"),
            )
            for row, count in enumerate(self._listed.tolist())
        ]


def list_logprobs(logits: torch.Tensor, tokens: torch.Tensor, listed: Integers) -> ListedLogprobs:
    """See `sampler.logprobs_of`; `logits` and `tokens` are on the device, which is not waited for."""
    scores = logits - logits.amax(1, keepdim=True)
    norms = scores.exp().sum(1, dtype=torch.float64).log()
    token_scores = scores.gather(1, tokens[:, None])
    ranks = (scores > token_scores).sum(1) + 1
    width = min(MOST_LISTED, scores.shape[1]) if listed.any() else 0
    tops = tokens.new_empty(len(token_scores), 0)
    if width:
        # Of equal ones the lower id comes first, which topk does not promise.
        tops = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    values = torch.cat([token_scores, scores.gather(1, tops)], 1).double() - norms[:, None]
    return ListedLogprobs(values, torch.cat([ranks[:, None], tops], 1), listed)
