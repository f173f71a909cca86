"""What the kernels of adapters are tried with before they are taken: every case that serving has."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from shapeshift.adapter_cache.lora import grouped, grouped_loading
from shapeshift.adapter_cache.lora.batch import ALIGNMENT
from shapeshift.adapter_cache.lora.grouped import TILE, TILE_FIELDS


class Call(NamedTuple):
    """What `add_terms` is called with."""

    places: torch.Tensor
    memory: torch.Tensor
    tiles: torch.Tensor
    most_ranks: int
    inputs: torch.Tensor
    outputs: torch.Tensor


@pytest.fixture(params=[1, 2, 64])
def calls(request: pytest.FixtureRequest) -> list[Call]:
    """Those of kernels that are right."""
    found: list[Call] = []

    def add(*given: Any) -> None:
        found.append(Call(*given))
        grouped.add_terms(*given)

    made = grouped_loading.verified(lambda: add, request.param, torch.zeros(1), pytest.fail)
    assert made is not None and made.most_ranks == request.param
    return found


def test_tiles_are_full_partly_full_and_empty(calls: list[Call]) -> None:
    for call in calls:
        owners, tokens = call.tiles[:, 0].tolist(), call.tiles[:, 1:]
        assert call.tiles.shape[1] == TILE_FIELDS
        full = (tokens >= 0).all(1)
        held = (tokens >= 0).any(1)
        assert full.any() and (held & ~full).any() and not held.all()
        assert all((owner < 0) == (not own) for owner, own in zip(owners, held.tolist(), strict=True))
        assert len([owner for owner in owners if owner == 0]) == 2, "more tokens of one adapter than a tile has"
        assert set(owners) == {-1, 0, 1}
        own = tokens[tokens >= 0]
        assert len(own.unique()) == len(own) < len(call.inputs), "a token has no adapter"
        assert int((call.tiles[owners.index(0), 1:] >= 0).sum()) == TILE


def test_ranks_are_the_most_one_and_between(calls: list[Call]) -> None:
    for call in calls:
        most = call.most_ranks
        ranks = call.places[:, :, 1]
        assert [int(own.max()) for own in ranks] == [most, 1, most // 2 + 1]
        assert int(ranks[2, 0]) == 0 and (ranks[:2] > 0)[:, : int((ranks[0] > 0).sum())].all()


def test_factors_lie_apart_where_adapters_lie_and_hold_numbers(calls: list[Call]) -> None:
    for call in calls:
        width = call.inputs.shape[1]
        taken = []
        for offset, rank, first, outputs in call.places.view(-1, 4).tolist():
            if rank:
                assert offset % ALIGNMENT == 0 and first + outputs <= call.outputs.shape[1]
                taken.append((offset, offset + rank * (width + outputs)))
        taken.sort()
        assert all(end <= start for (_, end), (start, _) in zip(taken, taken[1:], strict=False))
        assert taken[0][0] == 0 and taken[-1][1] <= len(call.memory) < taken[-1][1] + ALIGNMENT
        assert call.memory.isfinite().all() and call.memory.std() > 0.1


def test_parts_cover_the_outputs_with_widths_of_both_kinds(calls: list[Call]) -> None:
    kinds = set()
    for call in calls:
        parts = [(first, outputs) for _, rank, first, outputs in call.places[0].tolist() if rank]
        assert [first for first, _ in parts] == [sum(own for _, own in parts[:at]) for at in range(len(parts))]
        assert sum(outputs for _, outputs in parts) == call.outputs.shape[1]
        kinds.add(all(outputs % 16 == 0 for _, outputs in parts) and call.inputs.shape[1] % 16 == 0)
    assert kinds == {True, False}


def test_on_a_cpu_plain_torch_is_taken() -> None:
    made = grouped_loading.load(8, torch.zeros(1), pytest.fail)
    assert made is not None
    assert (made.add, made.name, made.most_ranks) == (grouped.add_terms, "grouped, torch", 8)
