"""Random tokens from those that min_p, top_k and top_p keep, in this order: operations of torch that never wait for a
device.

A GPU sorts a vocabulary faster than it makes a shortlist, as `kernels/draw.cpp` does. Tokens of equal weight are kept
or dropped together, and the order in which tokens share the interval of the draw is that of the kernel: a seed gives
the same token there and here, but where rounding decides between two.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shapeshift.fused_decode.engine.sampling.sampler import DEPTH

_LEAST_WEIGHT = 1e-37


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
