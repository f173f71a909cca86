"""Token merging by bipartite soft matching, between attention and MLP (ToMe; OTAS section II-C).

The patches alternate between two sets, B (1st, 3rd, ...) and A (2nd, 4th, ...). Each token of A is matched with the
token of B whose key is most similar (cosine), and the `merged` most similar pairs are merged. A merged token is the
mean of its patches; `sizes` counts them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from shapeshift.engines.casts import to_f32

Tensor = torch.Tensor


class Matches(NamedTuple):
    """The tokens of A that merge [n, merged], their partners in B [n, merged], and the rest of A in its order."""

    merged: Tensor
    partner: Tensor
    rest: Tensor


class Matching(nn.Module):
    """The choice of the tokens that merge. It has no weights: it is a module so that an engine can keep it in f32.

    Rounding a score to bf16 makes scores equal or swaps them, and other tokens merge.
    """

    def forward(self, keys: Tensor, merged: int) -> Matches:
        """keys [n, heads, t, dim], averaged over the heads -> the matches of `merged` tokens, 0 < merged <= t // 2."""
        similarity, partner = best_partners(to_f32(keys).mean(1))
        # One sorted list: every token of A is in exactly one of its two parts, also among equal scores.
        order = torch.sort(similarity, dim=1, descending=True).indices
        merged_a = order[:, :merged]
        rest = torch.sort(order[:, merged:], dim=1).values
        return Matches(merged_a, partner.gather(1, merged_a), rest)


def merge_patches(patches: Tensor, sizes: Tensor, matches: Matches) -> tuple[Tensor, Tensor]:
    """patches [n, t, width], sizes [n, t] -> patches [n, t - merged, width], sizes [n, t - merged].

    The rest of A comes first, in its order, then B. The sum of the sizes and the sum of size times token do not change.
    """
    merged_a, partner, rest = matches
    assignment = assignment_matrix(partner, (patches.shape[1] + 1) // 2, patches.dtype)
    weights = sizes.unsqueeze(2)
    mass = patches * weights
    b_sizes = sizes[:, 0::2] + torch.bmm(assignment, _pick(weights[:, 1::2], merged_a)).squeeze(2)
    b_mass = mass[:, 0::2] + torch.bmm(assignment, _pick(mass[:, 1::2], merged_a))
    remaining = torch.cat((_pick(patches[:, 1::2], rest), b_mass / b_sizes.unsqueeze(2)), 1)
    return remaining, torch.cat((sizes[:, 1::2].gather(1, rest), b_sizes), 1)


def best_partners(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Each token of A: its highest cosine similarity to a token of B, and the index of that token; both [n, t // 2]."""
    unit = keys / keys.norm(dim=2, keepdim=True)
    similarity = torch.bmm(unit[:, 1::2], unit[:, 0::2].transpose(1, 2))
    best, partner = similarity.max(2)
    return best, partner


def assignment_matrix(partner: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[n, count, merged]: 1 where the token of A (third axis) merges into the token of B (second axis)."""
    return (torch.arange(count, device=partner.device).view(1, -1, 1) == partner.unsqueeze(1)).to(dtype)


def _pick(rows: Tensor, indices: Tensor) -> Tensor:
    return rows.gather(1, indices.unsqueeze(2).expand(-1, -1, rows.shape[2]))
