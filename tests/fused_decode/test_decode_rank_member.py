"""What one rank loads: kernels, threads, its part of the layers; the sums and the head that meet those of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.fused_decode.interfaces import blocks_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.torch_operations import TorchOperations
from shapeshift.fused_decode.ranks import member
from shapeshift.fused_decode.ranks.collective import RankGroup
from shapeshift.fused_decode.ranks.member import Gathered, RankSpec, Summed, load_member
from tests.fused_decode.checkpoints import make_checkpoint
from tests.fused_decode.rank_groups import spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("member") / "small")


class Noted:
    """What `load_member` asked for; `compiled` stands for the kernels, None: there is no compiler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiled: Any = None) -> None:
        self.kernels: list[Path] = []
        self.threads: list[int] = []
        self.makers: list[tuple[Any, ...]] = []
        self._real, self._compiled = member.linear_makers, compiled
        monkeypatch.setattr(member.native_operations, "load", self._load)
        monkeypatch.setattr(member, "linear_makers", self._make)
        monkeypatch.setattr(member.torch, "set_num_threads", self.threads.append)

    def _load(self, cache: Path, log: Any) -> Any:
        self.kernels.append(cache)
        return self._compiled

    def _make(self, precision: str, group_size: int, dtype: torch.dtype, native: bool, log: Any) -> Any:
        self.makers.append((precision, group_size, dtype, native))
        return self._real(precision, group_size, dtype, False, log)


@pytest.mark.parametrize("native", [True, False])
def test_kernels_are_compiled_where_they_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    noted = Noted(monkeypatch)
    made = load_member(spec(folder, 0, 1, native=native, kernel_cache="kept", threads=3), RankGroup(0, 1))
    assert noted.kernels == ([Path("kept")] if native else [])
    # Without a compiler, and where they are not wanted, it is plain torch.
    assert noted.makers == [("f32", 0, torch.float32, False)] and made.operations.name == "torch"
    assert noted.threads[0] == 3


def test_compiled_kernels_are_the_operations_and_make_the_linears(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = TorchOperations("cpu")
    noted = Noted(monkeypatch, compiled)
    made = load_member(spec(folder, 0, 1, precision="bf16"), RankGroup(0, 1))
    assert noted.makers == [("bf16", 0, torch.bfloat16, True)] and made.operations is compiled


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_part_of_each_layer_and_the_cache_of_its_heads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    Noted(monkeypatch)
    whole = Architecture.read(folder)
    made = load_member(spec(folder, rank, 2, native=False, slots=3, max_length=64), RankGroup(rank, 2))
    network, cache = made.network, made.cache
    assert (made.slots, made.max_length, made.blocks) == (3, 64, 3 * blocks_of(64))
    numbers = 2 * cache.keys.numel()
    alone = load_member(spec(folder, 0, 1, native=False, slots=3, max_length=64), RankGroup(0, 1))
    assert numbers == alone.cache.keys.numel()
    assert made.vocab_size == whole.vocab_size and len(network.layers) == whole.layers
    for layer in network.layers:
        assert isinstance(layer.output, Summed) and isinstance(layer.down, Summed)
    assert isinstance(network.head, Gathered)
    assert network.head._outputs == whole.vocab_size


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
