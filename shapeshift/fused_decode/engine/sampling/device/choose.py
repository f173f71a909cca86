"""The next token of each row, chosen where the logits lie."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from shapeshift.fused_decode.engine.sampling.device.draw import draw
from shapeshift.fused_decode.engine.sampling.device.edits import DeviceLogits, moved
from shapeshift.fused_decode.engine.sampling.device.logprobs import logprobs_of
from shapeshift.fused_decode.engine.sampling.logprobs import TokenLogprobs
from shapeshift.fused_decode.engine.sampling.sampler import (
    NO_LOGPROBS,
    Flags,
    Integers,
    SamplingTable,
    uniforms,
)


class Chosen(NamedTuple):
    """ids, finite: INT64 and BOOL [rows], see `sampler.Sampler.choose`; logprobs: by row, where they are asked for."""

    ids: Integers
    finite: Flags
    logprobs: dict[int, TokenLogprobs]


@torch.inference_mode()
def choose(table: SamplingTable, logits: torch.Tensor, slots: Integers, lengths: Integers) -> Chosen:
    """See `sampler.Sampler.choose`. It waits for the device once, and again where logprobs are asked for."""
    listing = np.flatnonzero(table.logprobs[slots] != NO_LOGPROBS)
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
    found = {}
    if plain is not None:
        listed = logprobs_of(plain, ids[moved(listing, logits)], table.logprobs[slots[listing]])
        found = dict(zip(listing.tolist(), listed, strict=True))
    both = torch.stack([ids, finite.long()]).cpu().numpy()
    return Chosen(both[0], both[1].astype(bool), found)


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
