"""Quantised checkpoints, packed by hand as their formats say, against the weights that they stand for."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.model.formats.levels import scaled, unpacked
from shapeshift.fused_decode.model.formats.packing import packing_of
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import resolve
from tests.fused_decode import compressed_linears
from tests.fused_decode.decode_models import Tiny, batch, texts
from tests.fused_decode.families import make

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def compressed(form: str, bits: int, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel", "actorder": None} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


GROUPS = {"strategy": "group", "group_size": 32}
COMPRESSED = {
    "w4a16": compressed("pack-quantized", 4, **GROUPS),
    "w4a16, zeros": compressed("pack-quantized", 4, **GROUPS, symmetric=False),
    "w8a16": compressed("pack-quantized", 8),
    "w8a8": compressed("int-quantized", 8),
    "w8a8, zeros": compressed("int-quantized", 8, symmetric=False),
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32], "fmt": "float8_e4m3fn"}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
NUMBERS: dict[str, dict[str, Any]] = {
    "fp8, blocks": BLOCKS,
    "fp8, one scale": TENSOR,
    "fp8, AutoFP8": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "compressed, an output": compressed("float-quantized", 8, type="float"),
    "compressed, one scale": compressed("float-quantized", 8, type="float", strategy="tensor"),
    "compressed, blocks": compressed("float-quantized", 8, type="float", strategy="block", block_structure=[48, 32]),
}
FORMATS: dict[str, dict[str, Any]] = {
    "awq": {**AWQ, "modules_to_not_convert": ["visual"]},
    "gptq": GPTQ,
    "gptq_v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
    "gptq_8": {**GPTQ, "bits": 8},
    "gptq_whole": {**GPTQ, "group_size": -1},
    **COMPRESSED,
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
    if "config_groups" in stated:
        return pack_compressed(weight, stated)
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


def pack_compressed(weight: torch.Tensor, stated: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `pack`: levels are signed, and in words half their range is added to them."""
    fields = stated["config_groups"]["group_0"]["weights"]
    bits, symmetric, (outputs, inputs) = fields["num_bits"], fields["symmetric"], weight.shape
    half, numbers = 2 ** (bits - 1), torch.arange(inputs) // fields.get("group_size", inputs)
    groups = int(numbers.max()) + 1
    scales = torch.stack([weight[:, numbers == one].abs().amax(dim=1) for one in range(groups)], dim=1)
    scales = (scales / (half - 2)).bfloat16()
    zeros = torch.zeros(outputs, groups, dtype=torch.int64)
    if not symmetric:
        zeros = torch.randint(-1, 2, (outputs, groups), generator=torch.Generator().manual_seed(outputs))
    levels = (weight / scales.float()[:, numbers] + zeros[:, numbers]).round().clamp(-half, half - 1)
    meant = (levels - zeros[:, numbers]) * scales.float()[:, numbers]
    tensors = {"weight_scale": scales, "input_scale": torch.ones(1)}
    if stated["format"] == "int-quantized":
        tensors["weight"] = levels.to(torch.int8)
        return tensors | ({} if symmetric else {"weight_zero_point": zeros.to(torch.int8)}), meant
    order = list(range(32 // bits))
    tensors |= {"weight_packed": words(levels + half, bits, order), "weight_shape": torch.tensor([outputs, inputs])}
    if not symmetric:
        tensors["weight_zero_point"] = words((zeros + half).T, bits, order).T.contiguous()
    return tensors, meant


def pack_numbers(weight: torch.Tensor, stated: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `pack`, in fp8, whose largest number is 448."""
    fields = stated.get("config_groups", {}).get("group_0", {}).get("weights", {})
    name = "weight_scale_inv" if "weight_block_size" in stated else "weight_scale"
    blocks = fields.get("block_structure") if fields else stated.get("weight_block_size")
    outputs, inputs = weight.shape
    whole = not blocks and fields.get("strategy") != "channel" and stated["quant_method"] != "fbgemm_fp8"
    blocks = blocks or ([outputs, inputs] if whole else [1, inputs])
    rows, columns = torch.arange(outputs) // blocks[0], torch.arange(inputs) // blocks[1]
    largest = torch.zeros(int(rows.max()) + 1, int(columns.max()) + 1)
    for row, column in itertools.product(*map(range, largest.shape)):
        largest[row, column] = weight[rows == row][:, columns == column].abs().max()
    scales = largest / 448
    spread = scales[rows][:, columns]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, name: scales.view([1] if fields else []) if whole else scales}, numbers.float() * spread


def is_numbers(stated: Mapping[str, Any]) -> bool:
    return stated["quant_method"] in ("fp8", "fbgemm_fp8") or stated.get("format") == "float-quantized"


def packed_copy(source: Path, folder: Path, stated: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint in `folder` whose layers' linears are packed; returns all weights that its files stand for."""
    shutil.copytree(source, folder)
    tensors, meant = load_file(source / "model.safetensors"), {}
    for name in list(tensors):
        meant[name] = tensors[name]
        if name.endswith("proj.weight"):
            make_parts = pack_numbers if is_numbers(stated) else pack
            parts, meant[name] = make_parts(tensors.pop(name), stated)
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
    assert precision == f"int{8 if '8' in name else 4}"
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


@pytest.mark.parametrize("name", compressed_linears.SCHEMES)
def test_a_linear_is_what_compressed_tensors_itself_reads(name: str) -> None:
    with safe_open(compressed_linears.FILE, "pt") as file:
        stated = json.loads(file.metadata()[name])
    stored = load_file(compressed_linears.FILE).items()
    tensors = {part.removeprefix(f"{name}."): tensor for part, tensor in stored if part.startswith(f"{name}.")}
    read = tensors.pop("read")
    outputs, inputs = read.shape
    packing = packing_of({"quantization_config": stated})
    assert packing is not None
    for part, expected in packing.parts(outputs, inputs).items():
        assert tuple(tensors[part].shape) in (expected.shape, *expected.others), part
    found = (
        unpacked({"a": tensors}, packing).weight()
        if packing.bits
        else scaled(tensors["weight"], tensors["weight_scale"], packing.blocks)
    )
    assert torch.allclose(found, read, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_eight_bits_are_read_as_numbers(
    tiny: Callable[[str], Tiny], kernel_cache: Path, tmp_path: Path, name: str
) -> None:
    meant = packed_copy(tiny("qwen2").folder, tmp_path / "packed", NUMBERS[name])
    architecture = Architecture.read(tmp_path / "packed")
    assert architecture.packed_bits == 0
    plain = tmp_path / "plain"
    shutil.copytree(tiny("qwen2").folder, plain)
    save_file(meant, plain / "model.safetensors")
    for precision in ("f32", "int8"):
        assert torch.equal(*(logits_of(tmp_path / one, kernel_cache, precision) for one in ("packed", "plain")))


def test_scales_of_blocks_are_read_as_in_transformers(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    import transformers

    # transformers takes whole blocks alone.
    packed_copy(tiny("qwen2").folder, tmp_path / "packed", {**BLOCKS, "weight_block_size": [16, 16]})
    library: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    down = library.model.layers[1].mlp.down_proj.weight
    files = WeightFiles(tmp_path / "packed", Architecture.read(tmp_path / "packed"))
    # The library rounds to bf16.
    assert torch.allclose(files.linear(1, "down", torch.float32)[0], down, rtol=2**-8, atol=0.0)


def test_fp8_of_a_text_model_beside_one_of_images(kernel_cache: Path, tmp_path: Path) -> None:
    """As Ministral 3 is published."""
    plain = make("mistral3", tmp_path / "plain").folder
    meant = packed_copy(plain, tmp_path / "packed", TENSOR)
    save_file(meant, plain / "model.safetensors")
    assert torch.equal(*(logits_of(tmp_path / one, kernel_cache, "f32") for one in ("packed", "plain")))


def test_a_linear_of_fp8_needs_its_scales_and_a_plain_one_none(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    packed_copy(tiny("qwen2").folder, tmp_path / "packed", BLOCKS)
    file, module = tmp_path / "packed" / "model.safetensors", WORD.removesuffix(".qweight")
    tensors = load_file(file)
    del tensors[f"{module}.weight_scale_inv"]
    save_file(tensors, file)
    with pytest.raises(InvalidInputError, match=rf"lacks the tensor {module}\.weight_scale_inv"):
        WeightFiles(file.parent, Architecture.read(file.parent))
    tensors[f"{module}.weight"] = torch.ones(64, 64)
    save_file(tensors, file)
    weight, _ = WeightFiles(file.parent, Architecture.read(file.parent)).linear(1, "qkv", torch.float32)
    assert (weight[:64] == 1.0).all()


# As published: by llm-compressor in several releases, Qwen, Mistral, AutoFP8 and OpenAI.
_ARGS: dict[str, Any] = {"observer_kwargs": {}, "block_structure": None, "group_size": None, "actorder": None}
PUBLISHED: dict[str, dict[str, Any]] = {
    "W8A8": {
        "config_groups": {
            "group_0": {
                "input_activations": {**_ARGS, "num_bits": 8, "dynamic": True, "strategy": "token", "type": "int"},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    **_ARGS,
                    "dynamic": False,
                    "num_bits": 8,
                    "observer": "minmax",
                    "strategy": "channel",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "int-quantized",
        "global_compression_ratio": 1.4571,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "registry_requires_subclass": False},
    },
    "FP8 blocks": {
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "input_activations": {**_ARGS, "num_bits": 8, "dynamic": True, "strategy": "group", "type": "float"},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    **_ARGS,
                    "block_structure": [128, 128],
                    "dynamic": False,
                    "num_bits": 8,
                    "observer": "static_minmax",
                    "scale_dtype": None,
                    "strategy": "block",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.3.a20251114",
    },
    "Qwen3": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "Ministral 3": {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    },
    "AutoFP8": {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
    "gpt-oss": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"},
}


@pytest.mark.parametrize("stated", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configurations_are_read(stated: dict[str, Any]) -> None:
    assert packing_of({"quantization_config": stated}) is not None


def test_configurations_that_transformers_saves_are_read() -> None:
    from transformers.utils import quantization_config

    for config in (quantization_config.FineGrainedFP8Config(), quantization_config.Mxfp4Config()):
        assert packing_of({"quantization_config": json.loads(config.to_json_string(use_diff=False))})


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        (
            "W8A8",
            "permutation",
            "quantization_config.permutation: got 'x'; absent or null: it is not read, only .*config",
        ),
        ("Qwen3", "modules_to_convert", "quantization_config.modules_to_convert: got 'x'; absent or null: .*blo.*fmt"),
        ("gpt-oss", "rotation", "quantization_config.rotation: got 'x'; absent or null: .*modules_to_not_convert"),
    ],
)
def test_a_field_that_nobody_reads_is_refused(name: str, field: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        packing_of({"quantization_config": {**PUBLISHED[name], field: "x"}})
    assert packing_of({"quantization_config": {**PUBLISHED[name], field: None}}) is not None


@pytest.mark.parametrize("place", ["", "weights."])
def test_a_field_of_a_group_that_nobody_reads_is_refused(place: str) -> None:
    stated = copy.deepcopy(PUBLISHED["W8A8"])
    group = stated["config_groups"]["group_0"]
    (group["weights"] if place else group)["rotation"] = "hadamard"
    message = rf"config_groups\.group_0\.{place}rotation: got 'hadamard'; absent or null: it is not read, only"
    with pytest.raises(InvalidInputError, match=message):
        packing_of({"quantization_config": stated})


@pytest.mark.parametrize("stated", [AWQ, GPTQ])
def test_what_authors_add_to_awq_and_gptq_is_accepted(stated: dict[str, Any]) -> None:
    assert packing_of({"quantization_config": {**stated, "model_name_or_path": "x", "meta": {"quantizer": "a:1"}}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_scheme": {"num_bits": 8}}, "quantization_config.kv_cache_scheme: got .*not read"),
        ({"transform_config": {"a": 1}}, "quantization_config.transform_config: got .*not read"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format: got 'sparse-24-bitmask'",
        ),
        ({"config_groups": {}}, "quantization_config.config_groups: got .*one group"),
        (
            {"config_groups": {"a": {"targets": ["re:.*q_proj"], "weights": {}}}},
            "config_groups.a.targets: got .*Linear",
        ),
        ({"config_groups": {"a": {"targets": ["Linear"]}}}, "config_groups.a.weights: got None"),
        (
            {"format": "nvfp4-pack-quantized"},
            "quantization_config.format: got 'nvfp4-pack-quantized'",
        ),
    ],
)
def test_what_is_not_read_of_compressed_tensors_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        packing_of({"quantization_config": {**COMPRESSED["w8a8"], **changes}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 2}, "weights.num_bits: got 2; .*4 or 8"),
        ({"type": "float", "num_bits": 4}, "weights.num_bits: got 4; .*8 with type float"),
        ({"strategy": "tensor_group"}, "weights.strategy: got 'tensor_group'; .*channel or group"),
        ({"strategy": "group", "group_size": 40}, "weights.group_size: got 40; .*multiple of 32"),
        ({"actorder": "group"}, "weights.actorder: got 'group'; .*in order"),
        ({"type": "float", "strategy": "block", "block_structure": [0, 9]}, "format: got 'pack-quantized'"),
    ],
)
def test_weights_of_compressed_tensors_that_are_not_read_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        packing_of({"quantization_config": compressed("pack-quantized", 8, **changes)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [128]}, "quantization_config.weight_block_size: got .*two whole numbers"),
        ({"scale_fmt": "ue8m0"}, "quantization_config.scale_fmt: got 'ue8m0'"),
        ({"expert_dtype": "fp4"}, "quantization_config.expert_dtype: got 'fp4'"),
    ],
)
def test_other_kinds_of_fp8_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        packing_of({"quantization_config": {**BLOCKS, **changes}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"desc_act": True}, "quantization_config.desc_act: got True; .*order of their groups"),
        ({"bits": 3}, "quantization_config.bits: got 3; .*4 or 8 with gptq"),
        ({"group_size": 48}, "quantization_config.group_size: got 48; .*-1 or a multiple of 32"),
        ({"group_size": True}, "quantization_config.group_size: got True"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version: got 'gemv'; .*gemm"),
        ({"quant_method": "awq", "bits": 8}, "quantization_config.bits: got 8; .*4 with awq"),
        (
            {"quant_method": "bitsandbytes"},
            "quantization_config: got .*awq, gptq, compressed-tensors, fp8, fbgemm_fp8 or mxfp4",
        ),
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
        (lambda given: {WORD: given[WORD].float()}, f"{WORD}: got 'F32'; .*dtype must be one of I32"),
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
