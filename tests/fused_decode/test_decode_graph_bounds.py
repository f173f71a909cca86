"""Which steps a graph computes, edge by edge, and what the graphs of a model take."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shapeshift.engines import cuda_device
from shapeshift.errors import EngineError
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch
from shapeshift.fused_decode.model.architecture import Architecture, from_config
from shapeshift.fused_decode.model.graphs import device_memory
from shapeshift.fused_decode.model.graphs.bounds import CHUNKS, MIXED_ROWS, GraphBounds, bounds_of, power_of_two
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests.fused_decode.families import CASES

SLOTS, LONGEST = 64, 1024


NOTHING = torch.zeros(0, dtype=torch.int64)


def step(*lengths: int, starts: int = 0, **more: Any) -> StepBatch:
    made = torch.tensor(lengths, dtype=torch.int32)
    return StepBatch(NOTHING, NOTHING, torch.full_like(made, starts), made, NOTHING, **more)


@pytest.fixture(scope="module")
def small() -> Architecture:
    return from_config(CASES["llama"])


@pytest.mark.parametrize(
    ("count", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (32, 32), (33, 64), (64, 64), (65, 64)]
)
def test_a_power_of_two_holds_the_count_within_the_most(count: int, power: int) -> None:
    assert power_of_two(count, 1, SLOTS) == power
    assert power_of_two(count, 8, SLOTS) == max(power, 8)


@pytest.mark.parametrize(
    ("rows", "starts", "bounds"),
    [
        (1, 0, GraphBounds(1, 64)),
        (3, 63, GraphBounds(4, 64)),
        (3, 64, GraphBounds(4, 128)),
        (64, 1000, GraphBounds(64, LONGEST)),
    ],
)
def test_a_step_of_single_tokens(rows: int, starts: int, bounds: GraphBounds) -> None:
    assert bounds_of(step(*[1] * rows, starts=starts), SLOTS, LONGEST) == bounds


@pytest.mark.parametrize(
    ("singles", "chunk", "wanted"),
    [
        (0, 2, (8, 64)),
        (1, 64, (8, 64)),
        (8, 65, (8, 128)),
        (9, 128, (32, 128)),
        (32, 256, (32, 256)),
        (33, 256, (64, 256)),
    ],
)
def test_a_step_with_a_chunk_behind_single_tokens(singles: int, chunk: int, wanted: tuple[int, int]) -> None:
    found = bounds_of(step(*[1] * singles, chunk), SLOTS, LONGEST)
    assert found is not None and (found.rows, found.chunk) == wanted
    assert found.context == power_of_two(chunk, 64, LONGEST) and found.blocks == found.context // BLOCK_TOKENS


@pytest.mark.parametrize("lengths", [(1, 257), (64, 1), (2, 2), (1, 2, 1)])
def test_other_chunks_have_no_graph(lengths: tuple[int, ...]) -> None:
    assert bounds_of(step(*lengths), SLOTS, LONGEST) is None


def test_adapters_have_a_graph_where_their_linears_are_known() -> None:
    owners = torch.zeros(2, dtype=torch.int64)
    assert bounds_of(step(1, 1, adapters=owners), SLOTS, LONGEST) is None
    assert bounds_of(step(1, 1, adapters=owners), SLOTS, LONGEST, 5) == GraphBounds(2, 64, 0, 5)
    assert bounds_of(step(1, 70, adapters=owners), SLOTS, LONGEST, 5) == GraphBounds(8, 128, 128, 5)


def test_logits_of_further_tokens_have_no_graph() -> None:
    assert bounds_of(step(1, 1, further=torch.zeros(1, dtype=torch.int64)), SLOTS, LONGEST) is None


# What they take.


@pytest.mark.parametrize(
    ("least", "most", "count"), [(1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 64, 7), (64, 64, 1), (64, 65, 2), (64, 8, 1)]
)
def test_powers_of_two_are_counted_up_to_the_first_that_is_enough(least: int, most: int, count: int) -> None:
    assert device_memory.doublings(least, most) == count


def test_graphs_take_their_logits_and_once_the_largest_step(small: Architecture) -> None:
    own = FusedDecodeSettings("a", max_concurrency=4, max_length=128, prefill_tokens=16)
    # Contexts of 64 and 128; rows of 1, 2 and 4 and, with each chunk, of 8 and 32.
    logits = 2 * ((1 + 2 + 4) + 3 * (8 + 32)) * small.vocab_size * 4
    activations = 16 * (6 * small.hidden + 3 * small.inner_width) * 4
    gathered = 2 * 4 * 128 * small.kv_width * 4
    assert (len(CHUNKS), sum(MIXED_ROWS)) == (3, 40)
    assert device_memory.graph_bytes(small, own, "f32", False) == logits + activations + gathered
    assert device_memory.graph_bytes(small, own, "bf16", False) == logits + (activations + gathered) / 2


def test_more_slots_than_tokens_of_a_chunk_are_the_largest_step(small: Architecture) -> None:
    few, many = (FusedDecodeSettings("a", max_concurrency=4, max_length=64, prefill_tokens=own) for own in (1, 4))
    found = {device_memory.graph_bytes(small, one, "f32", True) for one in (few, many)}
    assert len(found) == 1


@pytest.mark.parametrize(("adapter_mb", "named"), [(0, False), (64, True)])
def test_the_plan_names_adapters_where_there_are_any(small: Architecture, adapter_mb: int, named: bool) -> None:
    own = FusedDecodeSettings("a", max_concurrency=4, max_length=128)
    found = json.loads(device_memory.of_decode(small, own, "f32", adapter_mb)["device_memory"])
    graphs = device_memory.graph_bytes(small, own, "f32", device_memory.has_gpu_kernels())
    assert list(found) == ["engines", "KV", *(["adapters"] if named else []), "graphs"]
    assert found.get("adapters") == (64.0 if named else None)
    assert found["graphs"] == round(graphs / 2**20, 1)


@pytest.mark.parametrize(("in_place", "free_mb"), [(True, 0.0), (False, 1e6), (False, 1.0)])
def test_graphs_of_refused_kernels_are_planned_again(
    small: Architecture, monkeypatch: pytest.MonkeyPatch, in_place: bool, free_mb: float
) -> None:
    own, said = FusedDecodeSettings("a", max_concurrency=32, max_length=4096), list[str]()
    monkeypatch.setattr(device_memory, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(cuda_device, "free_memory", lambda device: (free_mb, f"free of GPU {device}"))
    wanted = device_memory.graph_bytes(small, own, "bf16", in_place)
    planned = device_memory.graph_bytes(small, own, "bf16", True)
    sizes = f"{wanted / 2**20:.0f} MiB, {planned / 2**20:.0f} MiB in the memory plan"
    if free_mb == 1.0:
        with pytest.raises(EngineError, match=r"GPU 3: no memory for graphs .* lower max_concurrency or max_length"):
            device_memory.require_room(small, own, "bf16", in_place, 3, said.append)
    else:
        assert device_memory.require_room(small, own, "bf16", in_place, 3, said.append) == wanted
    assert said == ([] if in_place else [f"graphs with attention in plain torch want {sizes}"])
