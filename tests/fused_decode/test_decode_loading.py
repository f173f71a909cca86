"""From parameters to a runtime, and what is refused before any allocation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.interfaces import Runtime, StepBatch
from shapeshift.fused_decode.loading import load_runtime, need_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.kv_cache import cache_bytes
from shapeshift.fused_decode.model.tensor_layout import weight_bytes
from shapeshift.fused_decode.settings import FusedDecodeSettings, MemoryNeed
from tests.fakes import logger
from tests.fused_decode.checkpoints import LONGEST, VOCABULARY, make_checkpoint

MIB = 2**20
Load = Callable[..., Runtime]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "small")


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def load(folder: Path, kernel_cache: Path, logged: list[str]) -> Load:
    def load(**changes: object) -> Runtime:
        stated = {"checkpoint": str(folder), "precision": "f32", "max_concurrency": 3, "max_length": 64, **changes}
        return load_runtime(folder, FusedDecodeSettings(**stated), kernel_cache, "cpu", logger(logged))  # type: ignore[arg-type]

    return load


def test_a_checkpoint_becomes_a_runtime(load: Load, logged: list[str]) -> None:
    threads = torch.get_num_threads()
    runtime = load(native=False, threads=1)
    torch.set_num_threads(threads)
    assert (runtime.vocab_size, runtime.slots, runtime.max_length) == (VOCABULARY, 3, 64)
    assert runtime.eos_ids == frozenset({1})
    assert runtime.longest_step_s > 0
    slot, start, length = (torch.tensor([value], dtype=torch.int32) for value in (1, 0, 3))
    logits = runtime.forward(StepBatch(torch.tensor([4, 5, 6]), slot, start, length, torch.tensor([0])))
    assert logits.shape == (1, VOCABULARY) and np.isfinite(logits.numpy()).all()
    assert logged[0].startswith("memory bound ") and "3 slots of 64 tokens" in logged[0]
    assert logged[-1].startswith("llama, f32, ")


@pytest.mark.parametrize("group_size", [32, 128])
def test_settings_quantise(load: Load, logged: list[str], group_size: int) -> None:
    """The group is that of the settings: the same text has other logits in another group."""
    threads = torch.get_num_threads()
    slot, start, length = (torch.tensor([value], dtype=torch.int32) for value in (1, 0, 3))
    step = StepBatch(torch.tensor([4, 5, 6]), slot, start, length, torch.tensor([0]))
    own, other = (
        load(native=False, threads=1, precision="int4", group_size=size).forward(step).clone()
        for size in (group_size, 0 if group_size == 32 else 32)
    )
    torch.set_num_threads(threads)
    assert logged[1].startswith("llama, int4, ")
    assert own.isfinite().all() and not torch.equal(own, other)


def test_the_bound_is_that_of_weights_and_cache(folder: Path) -> None:
    architecture = Architecture.read(folder)
    slot, weights = cache_bytes(architecture, 1, 1000, "f32"), weight_bytes(architecture, "f32")
    need = need_of(architecture, FusedDecodeSettings("c", max_concurrency=50, max_length=1000), "f32")
    assert need.line(10**6) == (
        f"memory bound {(weights + 50 * slot) / MIB:.0f} MiB: weights {weights / MIB:.0f} MiB, "
        f"50 slots of 1000 tokens {50 * slot / MIB:.0f} MiB; available: 1000000 MiB"
    )


def test_the_cache_holds_the_stated_tokens(load: Load, folder: Path, logged: list[str]) -> None:
    """Not `max_concurrency` times `max_length`; one text of `max_length` fits always."""
    runtime = load(native=False, max_concurrency=32, kv_cache_tokens=100)
    assert (runtime.slots, runtime.max_length, runtime.blocks) == (32, 64, 7)
    assert "KV cache of 100 tokens" in logged[0]
    assert runtime.memory.nbytes == cache_bytes(Architecture.read(folder), 32, 64, "f32", blocks=7)  # type: ignore[attr-defined]
    with pytest.raises(InvalidInputError, match=r"kv_cache_tokens: got 63; 0, or at least max_length \(64\)"):
        load(kv_cache_tokens=63)


def test_a_cache_in_int8_holds_more_tokens(load: Load, folder: Path, logged: list[str]) -> None:
    runtime = load(native=False, kv_precision="int8")
    bound = cache_bytes(Architecture.read(folder), 3, 64, "f32", kv_precision="int8")
    assert runtime.memory.nbytes == bound < cache_bytes(Architecture.read(folder), 3, 64, "f32") / 2  # type: ignore[attr-defined]
    assert f"3 slots of 64 tokens {bound / MIB:.0f} MiB" in logged[0]
    with pytest.raises(InvalidInputError, match="kv_precision: got 'u8'; one of auto, int8"):
        load(kv_precision="u8")


def test_a_cache_in_int8_is_for_cpus(folder: Path, kernel_cache: Path) -> None:
    decode = FusedDecodeSettings(str(folder), kv_precision="int8")
    with pytest.raises(UnsupportedError, match="kv_precision: int8 is for CPUs; set auto for a GPU"):
        load_runtime(folder, decode, kernel_cache, "cuda:0", logger())


def test_too_many_tokens_are_refused_with_how_many_fit() -> None:
    def check(tokens: int, limit_mb: int) -> None:
        own = FusedDecodeSettings("c", max_length=100, kv_cache_tokens=tokens, memory_mb=limit_mb)
        MemoryNeed(own, 3.0, tokens / 10, 10.0).require(10**6)

    check(500, 63)
    with pytest.raises(InvalidInputError, match=r"kv_cache_tokens: got 500; at most 490 in 62 MiB \(memory_mb\)"):
        check(500, 62)
    with pytest.raises(InvalidInputError, match="memory_mb: got 22; at least 24 for one slot"):
        check(500, 22)


@pytest.mark.parametrize(
    ("slots", "limit_mb", "available", "message"),
    [
        (7, 0, 69.0, None),
        (7, 0, 68.9, r"max_concurrency: got 7; at most 6 with max_length 100 in 69 MiB \(available\)"),
        (7, 68, 10**6, r"max_concurrency: got 7; at most 6 with max_length 100 in 68 MiB \(memory_mb\)"),
        (7, 69, 10**6, None),
        (7, 200, 50, r"max_concurrency: got 7; at most 4 with max_length 100 in 50 MiB \(available\)"),
        (7, 19, 10**6, r"memory_mb: got 19; at least 22 for one slot; 19 MiB memory_mb"),
    ],
)
def test_settings_that_do_not_fit_are_refused(slots: int, limit_mb: int, available: float, message: str | None) -> None:
    def check() -> None:
        own = FusedDecodeSettings("c", max_concurrency=slots, max_length=100, memory_mb=limit_mb)
        MemoryNeed(own, 13.0, 8.0 * slots).require(available)

    if message is None:
        check()
        return
    with pytest.raises(InvalidInputError, match=message):
        check()


def test_a_full_gpu_is_refused_with_what_is_wanted_and_free(
    folder: Path, kernel_cache: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def free(device: int) -> tuple[float, str]:
        asked.append(device)
        return 0.25, "free of 16384 MiB of GPU 1 (T4)"

    monkeypatch.setattr(loading, "DEVICE_MEMORY", {"cuda": free})
    settings = FusedDecodeSettings(checkpoint=str(folder), precision="f32", max_concurrency=3, max_length=64)
    message = r"memory_mb: got 0; at least \d+ for one slot; 0 MiB free of 16384 MiB of GPU 1 \(T4\)"
    with pytest.raises(InvalidInputError, match=message):
        load_runtime(folder, settings, kernel_cache, "cuda:1", logger(logged))
    assert asked == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_refused(folder: Path, kernel_cache: Path) -> None:
    settings = FusedDecodeSettings(checkpoint=str(folder), precision="f32", max_concurrency=3, max_length=64)
    with pytest.raises(UnsupportedError, match="GPU 3: this machine has no NVIDIA driver .*; to use the CPU, set"):
        load_runtime(folder, settings, kernel_cache, "cuda:3", logger())


def test_nothing_is_allocated_for_settings_that_do_not_fit(load: Load, logged: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="max_concurrency: got 4096; at most"):
        load(max_concurrency=4096, max_length=LONGEST, memory_mb=2000)
    assert len(logged) == 1


def test_a_slot_longer_than_the_model_allows_is_refused(load: Load) -> None:
    with pytest.raises(InvalidInputError, match=rf"max_length: got {LONGEST + 1}; .*{LONGEST}"):
        load(max_length=LONGEST + 1, native=False)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def forget_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(cut, "whole safetensors file"), (forget_a_shard, "shard"), (other_shape, r"mlp.*shape|shape.*mlp|\[96, 64\]")],
)
def test_a_damaged_checkpoint_is_named(load: Load, folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(InvalidInputError, match=message):
        load(native=False)
