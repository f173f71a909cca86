"""Layers that are not alike: heads, their sizes and widths of MLPs that differ from layer to layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.model.architecture import Architecture, from_config
from shapeshift.fused_decode.model.assembly import assemble, linear_makers
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel
from shapeshift.fused_decode.model.kv_cache import KeyValueCache, cache_bytes
from shapeshift.fused_decode.model.tensor_layout import shapes, weight_bytes
from shapeshift.fused_decode.model.torch_operations import TorchOperations
from shapeshift.fused_decode.model.weights import WeightFiles
from tests.fused_decode.decode_models import LONGEST, Tiny, teacher_forced, texts
from tests.fused_decode.families import CASES

SLOTS = 3


@pytest.fixture
def architecture(tiny: Callable[[str], Tiny]) -> Architecture:
    wide = {"heads": 3, "kv_heads": 1, "head_dim": 24, "intermediate": 40, "qk_norm": "head"}
    return replace(Architecture.read(tiny("llama").folder), varied=({}, wide, {"kv_heads": 4}))


@pytest.fixture
def files(architecture: Architecture, tmp_path: Path) -> WeightFiles:
    chance = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=chance) * 0.2
        for name, shape in shapes(architecture).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return WeightFiles(tmp_path, architecture)


@pytest.fixture
def load(architecture: Architecture, files: WeightFiles, kernel_cache: Path) -> Callable[[bool], DecodeModel]:
    def run(native: bool) -> DecodeModel:
        cache = KeyValueCache(architecture, SLOTS, LONGEST, torch.float32)
        operations = native_operations.load(kernel_cache, print) if native else TorchOperations()
        assert operations is not None
        make = linear_makers("f32", 0, torch.float32, native)
        return DecodeModel(assemble(architecture, files, cache, torch.float32, make), operations, cache)

    return run


def test_each_layer_has_its_own_sizes(load: Callable[[bool], DecodeModel]) -> None:
    """The kernels against plain torch, in steps of prompts beside single tokens."""
    given = texts(SLOTS, seed=4)
    both = [teacher_forced(load(native), given, [2, 0, 1], seed=5) for native in (False, True)]
    seen = 0
    for (*place, expected), (*same, logits) in zip(*both, strict=True):
        assert place == same and (logits - expected).abs().max() < 1e-4
        seen += 1
    assert seen > 30


def test_the_memory_bound_counts_each_layer(architecture: Architecture, files: WeightFiles) -> None:
    cache = KeyValueCache(architecture, SLOTS, 20, torch.float32, kv_precision="int8")
    parts = [*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales]
    bound = cache_bytes(architecture, SLOTS, 20, "f32", kv_precision="int8")
    assert sum(part.nbytes for part in parts) == bound == cache.memory.nbytes
    held = sum(files.read(name, torch.float32).nbytes for name in shapes(architecture))
    assert weight_bytes(architecture, "f32") == held + architecture.vocab_size * architecture.hidden * 4


def test_layers_that_take_the_keys_and_values_of_another_take_no_memory() -> None:
    architecture = from_config(CASES["gemma4_text"])
    own = replace(architecture, layers=3, varied=architecture.varied[:3], windows=architecture.windows[:3])
    for precision in ("auto", "int8"):
        bounds = [cache_bytes(a, SLOTS, 20, "f32", kv_precision=precision) for a in (architecture, own)]
        assert bounds[0] == bounds[1]
        cache = KeyValueCache(architecture, SLOTS, 20, torch.float32, kv_precision=precision)
        assert [cache.keys[layer].data_ptr() for layer in (3, 4, 5)] == [
            cache.keys[layer].data_ptr() for layer in (1, 2, 1)
        ]


def test_ranks_do_not_divide_them(architecture: Architecture) -> None:
    with pytest.raises(InvalidInputError, match=r"tensor_parallel_size: got 2; 1 for llama: its layers are not alike"):
        architecture.share(2)
