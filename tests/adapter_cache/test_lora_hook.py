"""What is prepared for a set of adapters and when anew, which tokens a delta is for, and tiles that are made once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.adapter_cache.lora.batch import ALIGNMENT, BatchAdapters, LoraDelta, LoraHook, group_tokens, shifted
from shapeshift.adapter_cache.lora.grouped import TILE, FixedTiles, GroupedLora, tiles_of
from shapeshift.fused_decode.interfaces import StepBatch

EMPTY = torch.zeros(0, dtype=torch.int64)


class Kernels:
    """Notes each set that is prepared, and each call to add."""

    name = "noted"
    fits_graphs = False

    def __init__(self) -> None:
        self.prepared: list[BatchAdapters] = []
        self.added: list[list[list[int]]] = []
        self.arrays: BatchAdapters | None = None

    def prepare(self, adapters: BatchAdapters) -> Kernels:
        self.prepared.append(adapters)
        return self

    def add(self, groups: Any, *others: Any) -> None:
        firsts, order = groups.firsts.tolist(), groups.order.tolist()
        self.added.append([order[first:end] for first, end in zip(firsts, firsts[1:], strict=False)])

    def store(self, *given: Any) -> bool:
        return True


class Places:
    """version: raised by a test where an adapter has moved. asked: the sets."""

    def __init__(self) -> None:
        self.version = 1
        self.asked: list[list[int]] = []

    def __call__(self, numbers: list[int]) -> tuple[list[torch.Tensor], int]:
        self.asked.append(numbers)
        return [torch.full((1, 4, 3, 4), number) for number in numbers], self.version


def step(adapters: list[int], lengths: list[int]) -> StepBatch:
    return StepBatch(
        EMPTY, EMPTY, EMPTY, torch.tensor(lengths), EMPTY, adapters=torch.tensor(adapters, dtype=torch.int32)
    )


def test_a_set_is_prepared_once_and_anew_where_it_changes_or_one_moves() -> None:
    kernels, places = Kernels(), Places()
    hook = LoraHook(torch.zeros(1), places, kernels)
    for adapters in ([5, -1, 3], [3, 5, 5], [3, 5, -1]):
        hook.linear_delta(step(adapters, [1, 1, 1]))
    assert len(kernels.prepared) == 1 and places.asked == [[3, 5]] * 3
    assert kernels.prepared[0].places[:, 0, 0, 0, 0].tolist() == [3, 5]
    places.version = 2
    hook.linear_delta(step([3, 5, -1], [1, 1, 1]))
    assert len(kernels.prepared) == 2
    hook.linear_delta(step([3, 3, -1], [1, 1, 1]))
    assert len(kernels.prepared) == 3 and places.asked[-1] == [3]


def test_each_token_of_a_row_has_the_adapter_of_the_row() -> None:
    kernels = Kernels()
    hook = LoraHook(torch.zeros(1), Places(), kernels)
    delta = hook.linear_delta(step([7, -1, 4], [2, 1, 3]))
    delta.add(0, 0, torch.zeros(6, 2), torch.zeros(6, 2))
    # By adapter, in order of their numbers: 4, then 7.
    assert kernels.added == [[[3, 4, 5], [0, 1]]]


def delta_of(adapters: list[int], kernels: Kernels) -> LoraDelta:
    return LoraDelta(kernels, np.array(adapters), 2)


def test_a_subset_is_the_same_where_nothing_differs_and_none_without_an_adapter() -> None:
    kernels = Kernels()
    delta = delta_of([0, -1, 1], kernels)
    assert delta.subset(torch.tensor([0, 1, 2])) is delta
    assert delta.subset(torch.tensor([1])) is None
    part = delta.subset(torch.tensor([1, 2]))
    assert part is not None and part is not delta
    part.add(0, 0, torch.zeros(2, 2), torch.zeros(2, 2))
    assert kernels.added == [[[], [1]]]


def test_a_model_computes_the_terms_itself_where_the_kernels_give_their_arrays() -> None:
    kernels = Kernels()
    delta = delta_of([0, -1, 1], kernels)
    assert delta.low_rank(torch.tensor([2])) is None
    kernels.arrays = BatchAdapters(torch.zeros(1), torch.zeros(2, 1))
    whole = delta.low_rank(torch.tensor([0, 1, 2]))
    assert whole is not None
    part = delta.low_rank(torch.tensor([2]))
    assert part is not None
    groups = group_tokens(np.array([1]), 2)
    (_, _, own, last), (_, _, _, of_last) = _fields(whole), _fields(part)
    assert last is own
    assert (of_last.tokens, of_last.firsts.tolist(), of_last.order.tolist()) == (
        groups.tokens,
        groups.firsts.tolist(),
        groups.order.tolist(),
    )


def _fields(low_rank: Any) -> tuple[Any, ...]:
    return tuple(getattr(low_rank, name) for name in low_rank.__dataclass_fields__)


def test_places_move_with_their_adapter_and_the_others_fields_stay() -> None:
    relative = torch.arange(16).view(1, 1, 4, 4)
    moved = shifted(relative, 2 * ALIGNMENT)
    assert (moved - relative)[0, 0].tolist() == [[2 * ALIGNMENT, 0, 0, 0]] * 4
    assert relative.flatten().tolist() == list(range(16))


# Tiles.


def test_the_tiles_of_a_step_are_made_once_for_all_its_linears() -> None:
    calls: list[Any] = []
    made = GroupedLora(lambda *given: calls.append(given), "noted", 8)
    adapters = BatchAdapters(torch.zeros(1), torch.zeros(2, 1, 4, 3, 4, dtype=torch.int64))
    prepared = made.prepare(adapters)
    first, other, none = (group_tokens(np.array(own), 2) for own in ([0, 1], [1, 1], [-1, -1]))
    rows = torch.zeros(2, 2)
    for groups in (first, first, other, none):
        prepared.add(groups, 0, 0, rows, rows)
    tiles = [call[2] for call in calls]
    assert len(calls) == 3 and tiles[0] is tiles[1] and tiles[2] is not tiles[0]
    assert [call[3] for call in calls] == [8] * 3
    assert tiles[0][:, :2].tolist() == [[0, 0], [1, 1]] and tiles[2][:, :3].tolist() == [[1, 0, 1]]


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 1), (TILE, 1), (TILE + 1, 2), (2 * TILE, 2)])
def test_a_tile_holds_so_many_tokens(tokens: int, tiles: int) -> None:
    made = tiles_of(np.zeros(tokens, np.int64))
    assert len(made) == tiles and (made[:, 1:] >= 0).sum() == tokens


def test_fixed_tiles_are_filled_from_the_front_and_the_rest_is_empty() -> None:
    fixed = FixedTiles(3, torch.device("cpu"))
    assert (fixed.on_device == -1).all() and fixed.on_device.shape == (3, 1 + TILE)
    address = fixed.on_device.data_ptr()
    fixed.fill(tiles_of(np.array([1, 0])))
    assert fixed.on_device[:, 0].tolist() == [0, 1, -1]
    fixed.fill(tiles_of(np.array([4])))
    assert fixed.on_device[:, 0].tolist() == [4, -1, -1] and fixed.on_device.data_ptr() == address
