"""Token merging by bipartite soft matching, between attention and MLP (ToMe; OTAS section II-C).

The patches alternate between two sets, B (1st, 3rd, ...) and A (2nd, 4th, ...). Each token of A is matched with the
token of B whose key is most similar (cosine), and the `merged` most similar pairs are merged. A merged token is the
mean of its patches; `sizes` counts them.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def merge_patches(patches: Tensor, sizes: Tensor, keys: Tensor, merged: int) -> tuple[Tensor, Tensor]:
    """patches [n, t, width], sizes [n, t], keys [n, t, dim] -> patches [n, t - merged, width], sizes [n, t - merged].

    0 < merged <= t // 2. The rest of A comes first, in its order, then B. The sum of the sizes and the sum of size
    times token do not change.
    """
    similarity, partner = best_partners(keys)
    rest = torch.sort(torch.topk(similarity, similarity.shape[1] - merged, largest=False).indices).values
    merged_a = torch.topk(similarity, merged).indices
    assignment = assignment_matrix(partner.gather(1, merged_a), (keys.shape[1] + 1) // 2, patches.dtype)
    weights = sizes.unsqueeze(2)
    mass = patches * weights
    b_sizes = sizes[:, 0::2] + torch.bmm(assignment, _pick(weights[:, 1::2], merged_a)).squeeze(2)
    b_mass = mass[:, 0::2] + torch.bmm(assignment, _pick(mass[:, 1::2], merged_a))
    kept = torch.cat((_pick(patches[:, 1::2], rest), b_mass / b_sizes.unsqueeze(2)), 1)
    return kept, torch.cat((sizes[:, 1::2].gather(1, rest), b_sizes), 1)


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
