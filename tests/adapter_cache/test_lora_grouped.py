"""The terms of many adapters at once: tiles of tokens, plain torch, the kernels of a GPU interpreted, and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.adapter_cache.lora import grouped, grouped_loading
from shapeshift.adapter_cache.lora.batch import ALIGNMENT, BatchAdapters, group_tokens
from shapeshift.adapter_cache.lora.grouped import TILE, AddTerms, GroupedLora, tiles_of
from shapeshift.adapter_cache.lora.segmented import TorchLora
from tests.gpu_kernels import require_package

INPUTS, PARTS = 200, ((0, 96), (96, 40), (136, 170))
"""The inputs of a linear, and for each of its parts the first output and how many there are."""
WIDTH = 306


@pytest.fixture(params=["torch", "kernels"])
def add_terms(request: pytest.FixtureRequest) -> AddTerms:
    if request.param == "torch":
        return grouped.add_terms
    found: AddTerms = request.getfixturevalue("interpreted_add")
    return found


def adapters_of(ranks: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> BatchAdapters:
    """Adapters with these ranks of the parts of one linear, 0 for none, between elements that are NaN."""
    generator = torch.Generator().manual_seed(seed)
    pieces, places, start = [], torch.zeros(len(ranks), 1, 4, 3, 4, dtype=torch.int64), ALIGNMENT
    for adapter, own in enumerate(ranks):
        for part, rank in enumerate(own):
            first, outputs = PARTS[part]
            if rank:
                places[adapter, 0, 0, part] = torch.tensor([start, rank, first, outputs])
                taken = rank * (INPUTS + outputs)
                pieces.append((start, torch.randn(taken, generator=generator) / 4))
                start += -(-(taken + 1) // ALIGNMENT) * ALIGNMENT
    memory = torch.full((start,), float("nan"))
    for at, values in pieces:
        memory[at : at + len(values)] = values
    return BatchAdapters(memory.to(dtype), places)


# Tiles.


@pytest.mark.parametrize("seed", range(5))
def test_tiles_hold_each_token_once_beside_tokens_of_its_adapter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    adapters = rng.integers(-1, rng.integers(1, 9), rng.integers(1, 120))
    made = tiles_of(adapters, first=7)
    tokens = [(int(token) - 7, int(tile[0])) for tile in made for token in tile[1:] if token >= 0]
    assert sorted(tokens) == [(token, one) for token, one in enumerate(adapters.tolist()) if one >= 0]
    assert (made[:, 1] >= 7).all(), "a tile is empty"
    present = np.unique(adapters[adapters >= 0])
    assert len(made) == sum(-(-int((adapters == one).sum()) // TILE) for one in present)


def test_no_adapter_makes_no_tile() -> None:
    assert tiles_of(np.full(5, -1)).shape == (0, 1 + TILE)


# Terms.


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_terms_are_those_of_each_adapter_alone(
    add_terms: AddTerms, dtype: torch.dtype, error: float, tokens: int
) -> None:
    """Ranks 1 to 64, parts without a term, tokens without an adapter; nothing else is read or written."""
    adapters = adapters_of([(8, 0, 64), (64, 64, 64), (0, 1, 0), (16, 33, 8)], dtype, seed=tokens)
    owners = np.random.default_rng(tokens).integers(-1, 4, tokens)
    inputs = torch.randn(tokens, INPUTS, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = before.float().clone()
    # Adapter by adapter, in f32 from the same numbers.
    plain = BatchAdapters(adapters.memory.float(), adapters.places)
    TorchLora().prepare(plain).add(group_tokens(owners, 4), 0, 0, inputs.float(), expected)
    tiles = np.concatenate([tiles_of(owners), np.full((3, 1 + TILE), -1, np.int32)])
    found = before.clone()
    add_terms(adapters.places[:, 0, 0], adapters.memory, torch.from_numpy(tiles), 64, inputs, found)
    assert (found.float() - expected).abs().max() <= error * expected.abs().max()
    assert torch.equal(found[owners < 0], before[owners < 0])
    alone = [torch.from_numpy(owners == one) for one in (0, 2)]
    assert torch.equal(found[alone[0]][:, 96:136], before[alone[0]][:, 96:136])
    assert torch.equal(found[alone[1]][:, :96], before[alone[1]][:, :96])


def test_a_token_gets_the_same_term_whatever_is_beside_it(interpreted_add: AddTerms) -> None:
    """Bit for bit: what fills a graph repeats a token, and both write to one place."""
    adapters = adapters_of([(16, 16, 16), (64, 8, 8)], torch.float32, seed=1)
    inputs = torch.randn(1, INPUTS, generator=torch.Generator().manual_seed(5)).repeat(20, 1)
    found = []
    for owners in (np.zeros(20, np.int64), np.array([0, *[1] * 18, 0])):
        outputs = torch.zeros(20, WIDTH)
        tiles = torch.from_numpy(tiles_of(owners))
        interpreted_add(adapters.places[:, 0, 0], adapters.memory, tiles, 64, inputs, outputs)
        found += [outputs[0], outputs[19]]
    assert all(torch.equal(one, found[0]) for one in found)


def test_rows_may_lie_apart(add_terms: AddTerms) -> None:
    adapters = adapters_of([(8, 8, 8)], torch.float32, seed=2)
    wide = torch.randn(4, 2 * INPUTS, generator=torch.Generator().manual_seed(6))
    out, expected = torch.zeros(4, WIDTH + 50), torch.zeros(4, WIDTH)
    tiles = torch.from_numpy(tiles_of(np.zeros(4, np.int64)))
    places = adapters.places[:, 0, 0]
    grouped.add_terms(places, adapters.memory, tiles, 8, wide[:, :INPUTS].contiguous(), expected)
    add_terms(places, adapters.memory, tiles, 8, wide[:, :INPUTS], out[:, :WIDTH])
    torch.testing.assert_close(out[:, :WIDTH], expected, atol=1e-5, rtol=0)
    assert not out[:, WIDTH:].any()


def test_steps_without_a_graph(add_terms: AddTerms) -> None:
    adapters = adapters_of([(8, 8, 8), (32, 0, 4)], torch.float32, seed=7)
    prepared = GroupedLora(add_terms, "grouped", 32).prepare(adapters)
    groups = group_tokens(np.array([1, -1, 0, 0, 1]), 2)
    inputs, found = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(8)), torch.zeros(5, WIDTH)
    expected = torch.zeros(5, WIDTH)
    prepared.add(groups, 0, 0, inputs, found)
    TorchLora().prepare(adapters).add(groups, 0, 0, inputs, expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


# Which are taken.


def test_the_kernels_are_found_by_name() -> None:
    require_package()
    assert grouped.GPU_KERNELS["cuda"] is not grouped.add_terms


def test_kernels_that_were_interpreted_leave_the_language_to_be_compiled(interpreted_add: AddTerms) -> None:
    """On a GPU the tests of compiled kernels run in the same process."""
    from triton import language

    parts = (language, language.core, language.math, language.tensor)
    before = [dict(vars(part)) for part in parts]
    assert grouped_loading.verified(lambda: interpreted_add, 4, torch.zeros(1), pytest.fail) is not None
    assert [dict(vars(part)) for part in parts] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_ranks", [1, 64])
def test_kernels_that_are_right_are_taken(interpreted_add: AddTerms, dtype: torch.dtype, most_ranks: int) -> None:
    said = list[str]()
    made = grouped_loading.verified(lambda: interpreted_add, most_ranks, torch.zeros(1, dtype=dtype), said.append)
    assert made is not None and made.add is interpreted_add and made.most_ranks == most_ranks
    assert not said and made.fits_graphs


def missing() -> AddTerms:
    raise ModuleNotFoundError("No module named 'triton'")


def fails() -> AddTerms:
    def add(*given: Any) -> None:
        raise RuntimeError("no compiler")

    return add


def forgets() -> AddTerms:
    """The terms of the first part."""

    def add(places: torch.Tensor, *given: Any) -> None:
        rest = places.clone()
        rest[:, 0] = 0
        grouped.add_terms(rest, *given)

    return add


def overflows() -> AddTerms:
    def add(*given: Any) -> None:
        grouped.add_terms(*given)
        given[-1][-1, -1] = float("nan")

    return add


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (missing, "cannot run here: ModuleNotFoundError: No module named 'triton'"),
        (fails, "cannot run here: RuntimeError: no compiler"),
        (forgets, "give something else here, by "),
        (overflows, "give something else here, by inf"),
    ],
)
def test_kernels_that_are_missing_or_wrong_are_not_taken(kernels: Callable[[], AddTerms], reason: str) -> None:
    said = list[str]()
    assert grouped_loading.verified(kernels, 16, torch.zeros(1), said.append) is None
    assert len(said) == 1 and said[0].startswith("LoRA in plain torch, and its steps without graphs: its kernels ")
    assert reason in said[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernels_are_right_on_a_gpu(dtype: torch.dtype) -> None:
    made = grouped_loading.load(64, torch.zeros(1, dtype=dtype, device="cuda:0"), pytest.fail)
    assert made is not None and made.name == "grouped, triton"
