"""What one rank loads: kernels, threads, its part of the layers; the sums and the head that meet those of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.fused_decode.interfaces import blocks_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.native_operations import NativeLinear
from shapeshift.fused_decode.ranks.collective import RankGroup
from shapeshift.fused_decode.ranks.member import Gathered, RankSpec, Summed, load_member
from tests.fused_decode.checkpoints import make_checkpoint
from tests.fused_decode.rank_groups import spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("member") / "small")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_kernels_are_compiled_where_they_are_asked_for(
    folder: Path, kernel_cache: Path, native: bool, precision: str
) -> None:
    options = {"native": native, "kernel_cache": str(kernel_cache), "threads": 3, "precision": precision}
    made = load_member(spec(folder, 0, 1, **options), RankGroup(0, 1))
    assert made.operations.name == ("native" if native else "torch")
    assert isinstance(made.network.layers[0].qkv, NativeLinear) == native
    assert made.network.embedding.dtype == (torch.float32 if precision == "f32" else torch.bfloat16)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_part_of_each_layer_and_the_cache_of_its_heads(folder: Path, rank: int) -> None:
    whole = Architecture.read(folder)
    made = load_member(spec(folder, rank, 2, native=False, slots=3, max_length=64), RankGroup(rank, 2))
    network, cache = made.network, made.cache
    assert (made.slots, made.max_length, made.blocks) == (3, 64, 3 * blocks_of(64))
    alone = load_member(spec(folder, 0, 1, native=False, slots=3, max_length=64), RankGroup(0, 1))
    assert 2 * cache.memory.numel() == alone.cache.memory.numel()
    assert made.vocab_size == whole.vocab_size and len(network.layers) == whole.layers
    for layer in network.layers:
        assert isinstance(layer.output, Summed) and isinstance(layer.down, Summed)
    assert isinstance(network.head, Gathered)


def test_what_a_rank_loads_survives_its_way_to_the_process(folder: Path) -> None:
    own = spec(folder, 1, 2, kv_precision="int8", native=False, blocks=9)
    assert RankSpec.from_json(own.to_json()) == own


# The linears of a rank.


class OneRank:
    """A group that notes what it was given."""

    def __init__(self) -> None:
        self.summed: list[Any] = []

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        self.summed.append(rows)
        return rows + 100

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.cat([columns, columns + 10], dim=1)


def test_a_sum_is_over_what_the_own_part_gives() -> None:
    group: Any = OneRank()
    double: Callable[[torch.Tensor], torch.Tensor] = lambda rows: 2 * rows  # noqa: E731
    assert Summed(double, group)(torch.ones(1, 2)).tolist() == [[102.0, 102.0]]
    assert group.summed[0].tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(("outputs", "kept"), [(3, [1.0, 2.0, 11.0]), (4, [1.0, 2.0, 11.0, 12.0])])
def test_the_outputs_of_the_ranks_lie_side_by_side_up_to_the_vocabulary(outputs: int, kept: list[float]) -> None:
    group: Any = OneRank()
    assert Gathered(lambda rows: rows, group, outputs)(torch.tensor([[1.0, 2.0]])).tolist() == [kept]
