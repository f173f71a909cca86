"""Merging against its definition, one image and one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.model.merging import Matching, merge_patches
from shapeshift.token_adapt.model.schedule import activation_mb, count_multiplications, expand, output_tokens


def by_definition(
    patches: np.ndarray, sizes: np.ndarray, keys: np.ndarray, merged: int
) -> tuple[np.ndarray, np.ndarray]:
    """One image: every token of A against every token of B; the best pairs are merged one by one."""
    b, a = list(range(0, len(patches), 2)), list(range(1, len(patches), 2))

    def similarity(i: int, j: int) -> float:
        return float(keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j]))

    best = {i: max(b, key=lambda j: similarity(i, j)) for i in a}
    gone = sorted(a, key=lambda i: -similarity(i, best[i]))[:merged]
    members = {j: [j] + [i for i in gone if best[i] == j] for j in b}
    rest = [i for i in a if i not in gone]
    tokens = [patches[i] for i in rest] + [
        sum(sizes[i] * patches[i] for i in members[j]) / sum(sizes[i] for i in members[j]) for j in b
    ]
    return np.array(tokens), np.array([sizes[i] for i in rest] + [sum(sizes[i] for i in members[j]) for j in b])


def merge(patches: torch.Tensor, sizes: torch.Tensor, keys: torch.Tensor, merged: int) -> tuple[torch.Tensor, ...]:
    """keys [n, t, dim]: of one head."""
    return merge_patches(patches, sizes, Matching()(keys.unsqueeze(1), merged))


@pytest.mark.parametrize(("tokens", "merged"), [(2, 1), (3, 1), (9, 4), (10, 5), (16, 3), (17, 7)])
def test_merging_matches_its_definition(tokens: int, merged: int) -> None:
    noise = np.random.default_rng(tokens)
    patches, keys = noise.standard_normal((5, tokens, 6)), noise.standard_normal((5, tokens, 4))
    sizes = noise.integers(1, 5, (5, tokens)).astype(float)
    kept, counts = merge(torch.from_numpy(patches), torch.from_numpy(sizes), torch.from_numpy(keys), merged)
    assert kept.shape == (5, tokens - merged, 6)
    for image in range(5):
        wanted, wanted_sizes = by_definition(patches[image], sizes[image], keys[image], merged)
        np.testing.assert_allclose(counts[image], wanted_sizes)
        np.testing.assert_allclose(kept[image], wanted, atol=1e-12)


def test_equal_scores_neither_lose_nor_repeat_a_token() -> None:
    patches = torch.arange(40.0, dtype=torch.double).view(1, 20, 2)
    kept, sizes = merge(patches, torch.ones(1, 20, dtype=torch.double), torch.ones(1, 20, 3), 4)
    assert sizes.sum() == 20
    torch.testing.assert_close((sizes.unsqueeze(2) * kept).sum(1), patches.sum(1))


def test_mass_is_conserved_over_layers() -> None:
    torch.manual_seed(0)
    patches, sizes = torch.randn(3, 40, 8, dtype=torch.double), torch.ones(3, 40, dtype=torch.double)
    before = patches.sum(1)
    for layer in expand(-7, 40, 9):
        if layer.merged:
            assert patches.shape[1] == layer.patches
            patches, sizes = merge(patches, sizes, patches, layer.merged)
        torch.testing.assert_close(sizes.sum(1), torch.full((3,), 40.0, dtype=torch.double))
        torch.testing.assert_close((sizes.unsqueeze(2) * patches).sum(1), before)
    assert patches.shape[1] == 1


def test_schedules() -> None:
    assert [(layer.patches, layer.merged, layer.prompts) for layer in expand(-3, 10, 4)] == [
        (10, 3, 0),
        (7, 3, 0),
        (4, 2, 0),
        (2, 1, 0),
    ]
    assert {(layer.patches, layer.merged, layer.prompts) for layer in expand(4, 10, 2)} == {(10, 0, 4)}
    assert output_tokens(expand(-3, 10, 4), prefix=2) == 3
    with pytest.raises(InvalidInputError, match="schedule"):
        expand(0, 10, 0)


def test_multiplications_are_the_papers_count() -> None:
    plain = 12 * (12 * 197 * 768**2 + 2 * 197**2 * 768)
    assert count_multiplications(expand(0, 196, 12), 768) == plain
    attention, mlp = 4 * 17 * 64 + 2 * 17 * 17 * 8, 8 * 13 * 64
    assert count_multiplications(expand(-4, 16, 1), 8) == attention + mlp
    assert count_multiplications(expand(-15, 196, 12), 768) < 0.6 * plain
    # 1,024 patches of width 1,024: the MLP holds 2 x 1,024 + 4,096 numbers of 4 bytes for each token.
    assert activation_mb(expand(0, 1024, 1), 1024, 1, 4096, prefix=0) == 24.0
    assert activation_mb(expand(-4, 16, 2), 8, 2, 32) == activation_mb(expand(0, 16, 1), 8, 2, 32) > 0
