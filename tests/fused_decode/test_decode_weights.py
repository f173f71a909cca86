"""Checkpoint files: shards, shapes, and the memory bound."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cpu_runtime import DTYPES
from shapeshift.fused_decode.model.kv_cache import KeyValueCache, cache_bytes
from shapeshift.fused_decode.model.tensor_layout import linears, shapes, weight_bytes
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import WEIGHT_BITS, FusedDecodeSettings, computed, group_of
from shapeshift.kernels.levels import quantise
from tests.fused_decode.decode_models import Tiny
from tests.fused_decode.families import CONFIGS, make
from tests.sampling import few

INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(tiny: Callable[[str], Tiny], tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may break."""
    return Path(shutil.copytree(tiny("qwen2").folder, tmp_path / "checkpoint"))


def open_files(folder: Path) -> WeightFiles:
    return WeightFiles(folder, Architecture.read(folder))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    for number, half in enumerate(halves):
        save_file(half, folder / f"part-{number}.safetensors")
    places = {name: f"part-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def test_shards_are_read_as_one(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    into_shards(folder)
    files = open_files(folder)
    assert shapes(Architecture.read(folder)).keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(files.read(name, torch.float32), tensor)
        assert files.read(name, torch.bfloat16).dtype == torch.bfloat16


def test_a_missing_shard_is_named(folder: Path) -> None:
    into_shards(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"lacks the shard part-1\.safetensors"):
        open_files(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_an_invalid_index_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    (folder / "model.safetensors").rename(folder / "part-0.safetensors")
    with pytest.raises(InvalidInputError, match="weight_map"):
        open_files(folder)


def test_one_file_counts_before_the_shards_of_an_index(folder: Path) -> None:
    """As in transformers."""
    wanted = load_file(folder / "model.safetensors")[NORM]
    shutil.copy(folder / "model.safetensors", folder / "whole")
    into_shards(folder)
    for shard in folder.glob("part-*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    (folder / "whole").rename(folder / "model.safetensors")
    assert torch.equal(open_files(folder).read(NORM, torch.float32), wanted)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(NORM), tensors.pop(EMBEDDING)])
    with pytest.raises(InvalidInputError, match=rf"lacks the tensor {EMBEDDING} and 1 more"):
        open_files(folder)


def test_an_untied_head_is_required(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(InvalidInputError, match=f"lacks the tensor {HEAD}"):
        open_files(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 2**40, "num_hidden_layers: got 1099511627776; at most 1024"),
        ("num_hidden_layers", 900, "num_hidden_layers: got 900; 3: the weights hold so many layers"),
        ("hidden_size", 2**40, r"got \(\d+, \d+\); shape must be \(\d+, 1099511627776\)"),
        ("vocab_size", 2**40, r"head.weight: got \(.*\); shape must be \(1099511627776, 64\) by config.json"),
        ("intermediate_size", 2**40, r"mlp\..*_proj.weight: got \(.*\); shape must be \(.*1099511627776"),
        ("num_attention_heads", 2**40, "num_attention_heads|num_key_value_heads"),
    ],
)
def test_a_count_that_the_weights_do_not_hold_is_named_before_memory_is_planned(
    folder: Path, kernel_cache: Path, key: str, value: int, message: str
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value, "layer_types": None}))
    decode = FusedDecodeSettings(checkpoint=str(folder), max_length=64)
    with pytest.raises(InvalidInputError, match=message):
        loading.load_runtime(folder, decode, kernel_cache, "cpu", logging.getLogger(__name__))


def test_a_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: torch.zeros(63)}))
    with pytest.raises(InvalidInputError, match=rf"{NORM}: got \(63,\); shape must be \(64,\)"):
        open_files(folder)


def test_a_wrong_dtype_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: torch.zeros(64, dtype=torch.int32)}))
    with pytest.raises(InvalidInputError, match=f"{NORM}: got 'I32'; dtype must be one of F32"):
        open_files(folder)


def test_a_tensor_of_another_family_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}))
    with pytest.raises(InvalidInputError, match=r"o_proj\.bias: .* this qwen2 has no such tensor"):
        open_files(folder)


def test_a_broken_file_is_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInputError, match=r"^model\.safetensors: .* must be a whole safetensors file"):
        open_files(folder)


def test_copies_for_another_library_are_left_out(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"other names")
    (folder / "pytorch_model.bin").write_bytes(b"the same")
    assert open_files(folder).read(NORM, torch.float32).shape == (64,)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_checkpoints_of_the_model_without_its_head(tmp_path: Path, prefix: str) -> None:
    made = make("gpt2", tmp_path)
    table = made.reference.transformer.wte.weight

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        shorter = {name.removeprefix("transformer."): tensors.pop(name) for name in list(tensors)}
        tensors.update({prefix + name: tensor for name, tensor in shorter.items()})
        tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 8, 8)

    rewrite(tmp_path, rename)
    assert torch.equal(open_files(tmp_path).read("transformer.wte.weight", torch.float32), table)


def test_an_older_gpt_neox_calls_its_head_otherwise(tmp_path: Path) -> None:
    made = make("gpt_neox", tmp_path)
    head = made.reference.lm_head.weight

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("lm_head.weight", None)
        tensors["embed_out.weight"] = head.detach().clone()

    rewrite(tmp_path, rename)
    assert torch.equal(open_files(tmp_path).read("lm_head.weight", torch.float32), head)


@pytest.mark.parametrize("stored", few(("both", "head"), ("both",)))
@pytest.mark.parametrize("family", few(CONFIGS, ("llama", "gpt2", "gemma2", "gpt_neox", "qwen3_moe", "gpt_oss")))
def test_a_head_in_the_files_of_a_tied_model_counts_as_in_transformers(
    family: str, stored: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    make(family, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    names = Architecture.read(tmp_path).tensors

    def change(tensors: dict[str, torch.Tensor]) -> None:
        table = tensors[f"{names.embedding}.weight"]
        tensors.pop("lm_head.weight", None)
        # An older GPT-NeoX calls it so.
        tensors["embed_out.weight" if family == "gpt_neox" else "lm_head.weight"] = torch.randn_like(table)
        if stored == "head":
            del tensors[f"{names.embedding}.weight"]

    rewrite(tmp_path, change)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    files, architecture = open_files(tmp_path), Architecture.read(tmp_path)
    table = files.read(f"{names.embedding}.weight", torch.float32)
    head = table if architecture.tied else files.read(f"{names.head}.weight", torch.float32)
    assert architecture.tied == torch.equal(table, head) == (stored == "head")
    assert torch.equal(model.get_input_embeddings().weight, table)
    assert torch.equal(model.get_output_embeddings().weight, head)


def test_a_quantised_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: torch.zeros(64).to(torch.float8_e4m3fn)}))
    with pytest.raises(InvalidInputError, match=f"{NORM}: got 'F8_E4M3'; .*take the checkpoint before quantisation"):
        open_files(folder)


def test_other_formats_are_ignored(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidInputError, match=r"must hold model\.safetensors"):
        open_files(folder)


@pytest.mark.parametrize(("precision", "dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_the_memory_bound_of_a_cache_in_int8(
    tiny: Callable[[str], Tiny], precision: str, dtype: torch.dtype, head_dim: int
) -> None:
    architecture = replace(Architecture.read(tiny("llama").folder), head_dim=head_dim)
    cache = KeyValueCache(architecture, slots=3, max_length=20, dtype=dtype, kv_precision="int8")
    parts = [*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales]
    assert len(parts) == 4 * architecture.layers and {part.dtype for part in cache.keys} == {torch.int8}
    held = sum(part.nbytes for part in parts)
    assert cache_bytes(architecture, 3, 20, precision, kv_precision="int8") == held == cache.memory.nbytes
    assert cache_bytes(architecture, 3, 20, precision) == held * head_dim * dtype.itemsize // (head_dim + 4)


@pytest.mark.parametrize(("precision", "dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_memory_bound_is_the_allocated_memory(
    tiny: Callable[[str], Tiny], folder: Path, precision: str, dtype: torch.dtype
) -> None:
    architecture = Architecture.read(folder)
    cache = KeyValueCache(architecture, slots=3, max_length=20, dtype=dtype)
    assert cache_bytes(architecture, 3, 20, precision) == sum(part.nbytes for part in [*cache.keys, *cache.values])
    files = open_files(folder)
    held = sum(files.read(name, dtype).nbytes for name in shapes(architecture))
    assert weight_bytes(architecture, precision) == held
    tied = Architecture.read(tiny("llama").folder)
    table = tied.vocab_size * tied.hidden * dtype.itemsize
    parameters = sum(parameter.numel() for parameter in tiny("llama").reference.parameters())
    assert weight_bytes(tied, precision) == parameters * dtype.itemsize + table


@pytest.mark.parametrize(("precision", "group_size"), [("int8", 0), ("int4", 0), ("int4", 32)])
def test_the_memory_bound_of_quantised_weights(folder: Path, precision: str, group_size: int) -> None:
    architecture, files = Architecture.read(folder), open_files(folder)
    bits = WEIGHT_BITS[precision]
    weights = [
        (files.linear(layer, name, torch.float32)[0], bits)
        for layer in range(architecture.layers)
        for name in linears(architecture)
    ]
    weights.append((files.read("lm_head.weight", torch.float32), 8))
    held = sum(DTYPES[computed(precision)].itemsize * math.prod(shape) for shape in shapes(architecture).values())
    for weight, own in weights:
        levels = quantise(weight, own, group_of(own, weight.shape[1], group_size))
        held += weight.numel() * own // 8 + levels.scales.nbytes + levels.zeros.nbytes
        held -= weight.numel() * DTYPES[computed(precision)].itemsize
    assert weight_bytes(architecture, precision, group_size) == held
