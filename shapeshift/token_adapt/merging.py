"""Token merging: bipartite soft matching between a layer's attention and its MLP (ToMe; OTAS section II-C).

The patches are split by turns into two sets, B (the 1st, 3rd, ...) and A (the 2nd, 4th, ...). Each token of A
is joined to the token of B whose keys are most alike (cosine), and the `merged` joins with the highest
similarity are carried out: a token becomes the mean of all patches it stands for. `sizes` counts them.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def merge_patches(patches: Tensor, sizes: Tensor, keys: Tensor, merged: int) -> tuple[Tensor, Tensor]:
    """Join `merged` tokens to others: [n, t, width] to [n, t - merged, width]; the sizes [n, t] likewise.

    `keys` [n, t, dim] are what likeness is judged by; 0 < merged <= t // 2. What of A is left comes first, in its
    order, then B. The sum of sizes and the sum of size times token stay what they are.
    """
    likeness, partner = best_partners(keys)
    rest = torch.sort(torch.topk(likeness, likeness.shape[1] - merged, largest=False).indices).values
    gone = torch.topk(likeness, merged).indices
    joins = join_matrix(partner.gather(1, gone), (keys.shape[1] + 1) // 2, patches.dtype)
    weights = sizes.unsqueeze(2)
    mass = patches * weights
    b_sizes = sizes[:, 0::2] + torch.bmm(joins, _pick(weights[:, 1::2], gone)).squeeze(2)
    b_mass = mass[:, 0::2] + torch.bmm(joins, _pick(mass[:, 1::2], gone))
    kept = torch.cat((_pick(patches[:, 1::2], rest), b_mass / b_sizes.unsqueeze(2)), 1)
    return kept, torch.cat((sizes[:, 1::2].gather(1, rest), b_sizes), 1)


def best_partners(keys: Tensor) -> tuple[Tensor, Tensor]:
    """For each token of A its highest cosine similarity with a token of B, and which that is: both [n, t // 2]."""
    unit = keys / keys.norm(dim=2, keepdim=True)
    likeness = torch.bmm(unit[:, 1::2], unit[:, 0::2].transpose(1, 2))
    best, partner = likeness.max(2)
    return best, partner


def join_matrix(partner: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[n, count, merged]: 1 where the token of A (third axis) goes to the token of B (second axis)."""
    return (torch.arange(count, device=partner.device).view(1, -1, 1) == partner.unsqueeze(1)).to(dtype)


def _pick(rows: Tensor, indices: Tensor) -> Tensor:
    return rows.gather(1, indices.unsqueeze(2).expand(-1, -1, rows.shape[2]))
