"""The low-rank kernels at the edges: sizes that are no multiple of anything, and the limits of what they may read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from shapeshift.adapter_cache.lora import native
from shapeshift.adapter_cache.lora.batch import BatchAdapters, LoraDelta, LoraKernels
from shapeshift.adapter_cache.lora.segmented import TorchLora

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.fixture(scope="module")
def kernels(lora_kernels: Path) -> native.NativeLora:
    found = native.load(lora_kernels, lambda text: None)
    if found is None:
        pytest.skip("no compiler")
    return found


def one_linear(ranks: list[int], inputs: int, parts: list[tuple[int, int]], dtype: torch.dtype) -> BatchAdapters:
    """Adapters over a model of one linear, one behind the other; parts: (first output, outputs) of each part."""
    chance = torch.Generator().manual_seed(inputs)
    places = torch.zeros(len(ranks), 1, 1, 3, 4, dtype=torch.int64)
    end = 0
    for adapter, rank in enumerate(ranks):
        for part, (first, outputs) in enumerate(parts):
            places[adapter, 0, 0, part] = torch.tensor([end, rank, first, outputs])
            end += rank * (inputs + outputs)
    return BatchAdapters(torch.randn(end, generator=chance).to(dtype), places)


def term(kernels: LoraKernels, held: BatchAdapters, owners: list[int]) -> LoraDelta:
    return LoraDelta(kernels.prepare(held), np.array(owners), len(held.places))


# Around the lanes of a vector (8 and 16), the tokens and rows that are read together (4), the rows of A in a task (8),
# and the outputs of a task (128 to 1024).
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("inputs", [1, 7, 8, 15, 16, 17, 33, 70])
@pytest.mark.parametrize("outputs", [1, 5, 15, 17, 129, 1025])
def test_every_size_is_computed_whole(
    kernels: native.NativeLora, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    ranks, counts = [1, 3, 8, 9], [1, 3, 4, 6]
    held = one_linear(ranks, inputs, [(2, outputs), (outputs + 3, 2)], dtype)
    owners = [adapter for adapter, count in enumerate(counts) for _ in range(count)] + [-1]
    random.Random(inputs).shuffle(owners)
    rows = torch.randn(len(owners), inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = torch.zeros(len(owners), outputs + 6, dtype=dtype)
    plain, fast = before.clone(), before.clone()
    term(TorchLora(), held, owners).add(0, 0, rows, plain)
    term(kernels, held, owners).add(0, 0, rows, fast)
    scale = max(float(plain.float().abs().max()), 1.0)
    assert float((fast.float() - plain.float()).abs().max()) <= TOLERANCES[dtype] * scale
    beside = [0, 1, outputs + 2, outputs + 5]
    assert torch.equal(fast[:, beside], before[:, beside]), "outputs that no part has"
    assert bool((fast[:, 2 : outputs + 2] != 0).any(dim=0)[-1]), "the last output has a term"


def test_a_term_may_end_where_the_memory_ends(kernels: native.NativeLora) -> None:
    held = one_linear([5], 9, [(3, 17)], torch.float32)
    rows, out = torch.ones(1, 9), torch.zeros(1, 20)
    term(kernels, held, [0]).add(0, 0, rows, out)
    assert out[0, 3:].all() and not out[0, :3].any()


@pytest.mark.parametrize(
    ("field", "more"),
    [(0, 1), (1, 1), (2, 1), (3, 1), (0, -1), (1, -6), (2, -4), (3, -17)],
    ids=["offset", "rank", "first", "outputs", "offset<0", "rank<0", "first<0", "outputs=0"],
)
def test_one_element_beyond_is_refused(kernels: native.NativeLora, field: int, more: int) -> None:
    held = one_linear([5], 9, [(3, 17)], torch.float32)
    held.places[0, 0, 0, 0, field] += more
    with pytest.raises(RuntimeError, match="lies outside the memory or the outputs"):
        term(kernels, held, [0]).add(0, 0, torch.ones(1, 9), torch.zeros(1, 20))


def test_a_rank_beyond_every_memory_is_refused(kernels: native.NativeLora) -> None:
    """The sum of offset and size must not overflow into the allowed range."""
    for field, value in ((0, 2**63 - 1), (1, 2**62), (2, 2**63 - 1), (3, 2**62)):
        held = one_linear([5], 9, [(3, 17)], torch.float32)
        held.places[0, 0, 0, 0, field] = value
        with pytest.raises(RuntimeError, match="lies outside the memory or the outputs"):
            term(kernels, held, [0]).add(0, 0, torch.ones(1, 9), torch.zeros(1, 20))
