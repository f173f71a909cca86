"""Models from GGUF files compute what their weights say; levels that serve as they are stay exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from shapeshift.build_engines.decoding import reference
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.gguf import folder as gguf
from shapeshift.engines.gguf import tensors
from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.model.formats.levels import of_blocks
from shapeshift.fused_decode.model.tensor_layout import weight_bytes
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import resolve
from tests.engines import gguf_models
from tests.engines.gguf_models import LINEARS, all_linears

PROMPT = torch.arange(20, 60)


def made(tmp_path: Path, **options: Any) -> Path:
    gguf_models.write(tmp_path / "model.gguf", **options)
    return gguf.write(tmp_path / "model.gguf", tmp_path / "build" / "gguf")


def logits(folder: Path, precision: str, kernel_cache: Path) -> torch.Tensor:
    options = ModelOptions(precision=precision, slots=1, max_length=64, threads=1, cache_dir=kernel_cache)
    model = DecodeModel.load(folder, options)
    slot, places = torch.zeros(1, dtype=torch.int32), torch.arange(len(PROMPT))
    batch = StepBatch(PROMPT, slot, slot, slot + len(PROMPT), places[:0], further=places)
    return model.forward(batch).float().clone()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_levels_of_blocks_are_the_numbers_of_the_file(kind: str) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    stored = GGMLQuantizationType[kind]
    blocks = quantize(weight.numpy(), stored)
    levels = of_blocks([(kind, torch.from_numpy(blocks)), (kind, torch.from_numpy(blocks))])
    assert torch.equal(levels.weight(), torch.from_numpy(dequantize(blocks, stored)).repeat(2, 1))


def test_blocks_of_both_kinds_of_four_bits_stack() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).numpy()
    parts = [(kind, torch.from_numpy(quantize(weight, GGMLQuantizationType[kind]))) for kind in ("Q4_0", "Q4_1")]
    both = of_blocks(parts).weight()
    assert torch.equal(both, torch.cat([of_blocks([part]).weight() for part in parts]))


@pytest.mark.parametrize("kinds", [{}, all_linears("Q4_1"), {**all_linears("Q8_0"), "token_embd": "Q8_0"}])
def test_logits_are_those_of_transformers(tmp_path: Path, kinds: dict[str, str]) -> None:
    import transformers

    folder = made(tmp_path, kinds=kinds)
    checkpoint = open_checkpoint(folder)
    library = transformers.AutoTokenizer.from_pretrained(str(folder))
    result = reference.require_logits(checkpoint, library, False, tmp_path / "compared", tmp_path / "kernels")
    assert result == "logits as transformers'"


def test_a_model_that_is_computed_otherwise_is_refused(tmp_path: Path) -> None:
    """The comparison reads the same numbers; what it holds is how they are computed."""
    import transformers

    folder = made(tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    checkpoint = open_checkpoint(folder)
    checkpoint.config["rope_parameters"]["rope_theta"] = 10000.0
    library = transformers.AutoTokenizer.from_pretrained(str(folder))
    with pytest.raises(UnsupportedError, match="differs"):
        reference.require_logits(checkpoint, library, False, tmp_path / "compared", tmp_path / "kernels")


@pytest.mark.parametrize(("kind", "precision"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8")])
def test_levels_serve_as_they_are(tmp_path: Path, kernel_cache: Path, kind: str, precision: str) -> None:
    folder = made(tmp_path, kinds={**all_linears(kind), "token_embd": "Q8_0"})
    exact, got = logits(folder, "f32", kernel_cache), logits(folder, precision, kernel_cache)
    # What differs is the rounding of activations.
    assert (got - exact).norm() < 0.1 * exact.norm()
    files = WeightFiles(folder, Architecture.read(folder))
    levels, _ = files.levels(0, "qkv", torch.float32)
    plain, _ = files.linear(0, "qkv", torch.float32)
    assert torch.equal(levels.weight(), plain)
    entry = tensors.read_index(folder)["model.embed_tokens.weight"]
    head = files.head_levels("model.embed_tokens.weight")
    assert torch.equal(head.weight(), torch.from_numpy(tensors.numbers(folder, entry)))


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_each_expert_has_its_part_of_a_tensor_of_all(tmp_path: Path, kernel_cache: Path, kind: str) -> None:
    count = 3
    changes = {key.replace("llama.", "olmoe."): value for key, value in gguf_models.METADATA.items() if "llama" in key}
    norms = {
        f"blk.{layer}.{name}.weight": np.ones(LINEARS[name.removesuffix("_norm")][0], np.float32)
        for layer in range(gguf_models.LAYERS)
        for name in ("attn_q_norm", "attn_k_norm")
    }
    experts = {f"{name}_exps": kind for name in LINEARS if name.startswith("ffn")}
    folder = made(
        tmp_path,
        architecture="olmoe",
        changes={**changes, "olmoe.expert_count": count, "olmoe.expert_used_count": 2},
        without=tuple(key for key in gguf_models.METADATA if "llama" in key),
        kinds={**all_linears("Q8_0"), **experts, "token_embd": "Q8_0"},
        tensors=norms,
        experts=count,
    )
    reader = GGUFReader(tmp_path / "model.gguf")
    whole = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).view(count, -1)
        for tensor in reader.tensors
        if "_exps" in tensor.name
    }
    architecture = Architecture.read(folder)
    files = WeightFiles(folder, architecture)
    for number in range(count):
        levels, _ = files.levels(1, f"down.{number}", torch.float32)
        assert torch.equal(levels.weight().flatten(), whole["blk.1.ffn_down_exps.weight"][number])
        both, _ = files.levels(1, f"gate_up.{number}", torch.float32)
        parts = [whole[f"blk.1.ffn_{name}_exps.weight"][number] for name in ("gate", "up")]
        assert torch.equal(both.weight().flatten(), torch.cat(parts))
    exact, got = logits(folder, "f32", kernel_cache), logits(folder, "int8", kernel_cache)
    assert torch.cosine_similarity(exact, got).median() > 0.99


def test_a_head_of_other_blocks_is_quantised(tmp_path: Path, kernel_cache: Path) -> None:
    folder = made(tmp_path, kinds={**all_linears("Q4_0"), "token_embd": "Q5_0"})
    assert WeightFiles(folder, Architecture.read(folder)).head_levels("model.embed_tokens.weight") is None
    exact, got = logits(folder, "f32", kernel_cache), logits(folder, "int4", kernel_cache)
    assert (got - exact).norm() < 0.1 * exact.norm()


def test_a_small_model_is_served_in_plain_numbers(tmp_path: Path) -> None:
    model = Architecture.read(made(tmp_path, kinds=all_linears("Q4_0")))
    assert resolve("auto", packed_bits=model.packed_bits) in ("f32", "bf16")
    assert resolve("auto", packed_bits=replace(model, layers=10**6).packed_bits) == "int4"


def test_the_memory_of_levels_is_counted(tmp_path: Path) -> None:
    folder = made(tmp_path, kinds={**all_linears("Q4_1"), "token_embd": "Q8_0"})
    model = Architecture.read(folder)
    files = WeightFiles(folder, model)
    held = 0
    for layer in range(model.layers):
        for name in ("qkv", "output", "gate_up", "down"):
            levels, _ = files.levels(layer, name, torch.float32)
            assert levels.minima is not None
            held += levels.levels.numel() // 2
            held += levels.scales.nbytes + levels.zeros.nbytes + levels.minima.nbytes
    head = files.head_levels("model.embed_tokens.weight")
    held += head.levels.numel() + head.scales.nbytes + head.zeros.nbytes
    assert weight_bytes(model, "int4") >= held
