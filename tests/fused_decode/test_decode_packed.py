"""AWQ and GPTQ checkpoints, packed by hand as their formats say, against the weights that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import Architecture, packing_of
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import resolve
from tests.fused_decode.decode_models import Tiny, batch, texts

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FORMATS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq_v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
    "gptq_8": {**GPTQ, "bits": 8},
    "gptq_whole": {**GPTQ, "group_size": -1},
}
WORD = "model.layers.1.self_attn.q_proj.qweight"


def words(levels: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """INT32 [rows, columns / n] of levels [rows, columns]: level order[i] of each n ones lies at bit i times `bits`."""
    columns = levels.long().view(levels.shape[0], -1, len(order))
    packed = sum(columns[..., place] << (number * bits) for number, place in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().contiguous()


def pack(weight: torch.Tensor, stated: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a weight [outputs, inputs], and the weight that they stand for."""
    bits, (outputs, inputs) = stated["bits"], weight.shape
    group = inputs if stated["group_size"] == -1 else stated["group_size"]
    groups = -(-inputs // group)
    numbers = torch.arange(inputs) // group
    highest, chance = 2**bits - 1, torch.Generator().manual_seed(outputs)
    scales = torch.stack([weight[:, numbers == one].abs().amax(dim=1) for one in range(groups)], dim=1)
    scales = (scales / (highest // 2)).half()
    zeros = highest // 2 + torch.randint(0, 3, (outputs, groups), generator=chance)
    levels = (weight / scales.float()[:, numbers] + zeros[:, numbers]).round().clamp(0, highest)
    meant = (levels - zeros[:, numbers]) * scales.float()[:, numbers]
    if stated["quant_method"] == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {"qweight": words(levels.T, bits, order), "qzeros": words(zeros.T, bits, order)}
    else:
        order, less = list(range(32 // bits)), 0 if stated.get("checkpoint_format") == "gptq_v2" else 1
        tensors = {"qweight": words(levels, bits, order).T.contiguous(), "qzeros": words(zeros.T - less, bits, order)}
        tensors["g_idx"] = numbers.int()
    return {**tensors, "scales": scales.T.contiguous()}, meant


def packed_copy(source: Path, folder: Path, stated: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint in `folder` whose layers' linears are packed; returns all weights that its files stand for."""
    shutil.copytree(source, folder)
    tensors, meant = load_file(source / "model.safetensors"), {}
    for name in list(tensors):
        meant[name] = tensors[name]
        if name.endswith("proj.weight"):
            parts, meant[name] = pack(tensors.pop(name), stated)
            tensors |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    configure(folder, stated)
    return meant


def configure(folder: Path, stated: Mapping[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))


def logits_of(folder: Path, kernels: Path, precision: str) -> torch.Tensor:
    model = DecodeModel.load(
        folder,
        ModelOptions(precision=precision, slots=1, max_length=96, threads=1, cache_dir=kernels),
        lambda line: None,
    )
    return model.forward(batch([texts(1, seed=3)[0]], [0], [0]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_checkpoint_is_what_its_levels_stand_for(
    tiny: Callable[[str], Tiny], kernel_cache: Path, tmp_path: Path, name: str
) -> None:
    stated = FORMATS[name]
    meant = packed_copy(tiny("qwen2").folder, tmp_path / "packed", stated)
    architecture = Architecture.read(tmp_path / "packed")
    precision = resolve("auto", packed_bits=architecture.packed_bits)
    assert precision == f"int{stated['bits']}"
    files = WeightFiles(tmp_path / "packed", architecture)
    down, _ = files.linear(1, "down", torch.float32)
    assert torch.equal(down, meant["model.layers.1.mlp.down_proj.weight"])
    plain = tmp_path / "plain"
    shutil.copytree(tiny("qwen2").folder, plain)
    save_file(meant, plain / "model.safetensors")
    expected = logits_of(plain, kernel_cache, "f32")
    assert torch.equal(logits_of(tmp_path / "packed", kernel_cache, "f32"), expected)
    # Rows are quantised, and the head has 8 bits.
    off = logits_of(tmp_path / "packed", kernel_cache, precision) - expected
    assert 0.0 < off.abs().max() < 0.08 * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"desc_act": True}, "quantization_config.desc_act: got True; .*order of their groups"),
        ({"bits": 3}, "quantization_config.bits: got 3; .*4 or 8 with gptq"),
        ({"group_size": 48}, "quantization_config.group_size: got 48; .*-1 or a multiple of 32"),
        ({"group_size": True}, "quantization_config.group_size: got True"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version: got 'gemv'; .*gemm"),
        ({"quant_method": "awq", "bits": 8}, "quantization_config.bits: got 8; .*4 with awq"),
        ({"quant_method": "bitsandbytes"}, "quantization_config: got .*awq or gptq"),
        ({"modules_to_not_convert": ["o_proj"]}, "modules_to_not_convert: got .*all layers alike"),
        ({"lm_head": True}, "quantization_config.lm_head: got True"),
    ],
)
def test_other_ways_to_quantise_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        packing_of({"quantization_config": {**GPTQ, **changes}})


def test_a_file_cut_short_is_named(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    packed_copy(tiny("qwen2").folder, tmp_path / "packed", AWQ)
    file = tmp_path / "packed" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InvalidInputError, match=r"model\.safetensors: got .*whole safetensors file"):
        WeightFiles(file.parent, Architecture.read(file.parent))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: {WORD: given[WORD][:-1]}, f"{WORD}: got .*shape must be"),
        (lambda given: {WORD: given[WORD].float()}, f"{WORD}: got 'F32'; .*dtype must be I32"),
        (lambda given: {WORD.replace("qweight", "weight"): torch.zeros(64, 64)}, "has no such tensor"),
    ],
)
def test_tensors_of_another_form_are_named(
    tiny: Callable[[str], Tiny],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
) -> None:
    packed_copy(tiny("qwen2").folder, tmp_path / "packed", AWQ)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, **{name: tensor.contiguous() for name, tensor in change(tensors).items()}}, file)
    with pytest.raises(InvalidInputError, match=message):
        WeightFiles(file.parent, Architecture.read(file.parent))


def test_inputs_in_another_order_are_refused(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    packed_copy(tiny("qwen2").folder, tmp_path / "packed", GPTQ)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = WORD.replace("qweight", "g_idx")
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file)
    files = WeightFiles(file.parent, Architecture.read(file.parent))
    with pytest.raises(InvalidInputError, match=f"{name}: got 1; .*desc_act is not supported"):
        files.linear(1, "qkv", torch.float32)
