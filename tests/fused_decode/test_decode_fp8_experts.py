"""Mixtures whose experts are in fp8, as Llama 4 Maverick is published, against transformers with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.model.weights import WeightFiles
from tests.fused_decode.decode_models import Tiny, batch, teacher_forced, texts
from tests.fused_decode.families import CASES, make, reference_logits

LOGITS_TOLERANCE = 1e-4
TIE = 1e-3
LARGEST = 448
FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["language_model.lm_head", "language_model.model.layers.0.self_attn.q_proj"],
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["re:.*self_attn", "re:.*router", "re:vision_model.*", "language_model.lm_head"],
}


def rows_in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of [..., outputs, inputs]: numbers, scales [..., outputs, 1], and what they stand for."""
    scales = weight.abs().amax(dim=-1, keepdim=True) / LARGEST
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * scales


def whole(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The experts in one tensor, [experts, inputs, outputs], as FBGEMM's module in transformers has them."""
    numbers, scales, meant = rows_in_fp8(weight.mT)
    gate_up = name.endswith("gate_up_proj")
    return {name: numbers.mT, f"{name}_scale": scales.mT if gate_up else scales}, meant.mT


def apart(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Each expert with linears of its own, as llm-compressor writes them."""
    numbers, scales, meant = rows_in_fp8(weight.mT)
    module, _, last = name.rpartition(".")
    tensors: dict[str, torch.Tensor] = {}
    for number, both in enumerate(zip(numbers, scales, strict=True)):
        for part, tensor in zip(("weight", "weight_scale"), both, strict=True):
            halves = tensor.chunk(2) if last == "gate_up_proj" else [tensor]
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            tensors |= {f"{module}.{number}.{one}.{part}": half for one, half in zip(names, halves, strict=True)}
    return tensors, meant.mT


def in_fp8(tiny: Tiny, stated: dict[str, Any], form: Any) -> None:
    """Quantise experts, shared ones and dense MLPs of a checkpoint; its reference gets what they stand for."""
    file, config = tiny.folder / "model.safetensors", tiny.folder / "config.json"
    tensors, parameters = load_file(file), dict(tiny.reference.named_parameters())
    for name in [name for name in tensors if "feed_forward" in name and "router" not in name]:
        weight = tensors.pop(name)
        if ".experts." in name:
            parts, meant = form(name, weight)
        else:
            numbers, scales, meant = rows_in_fp8(weight)
            parts = {name: numbers, f"{name}_scale": scales}
        tensors |= parts
        # The names in files differ by their beginning.
        (parameter,) = [key for key in parameters if key.endswith(name.partition("layers.")[2])]
        parameters[parameter].data.copy_(meant)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": stated}))


@pytest.fixture
def maverick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Every other layer is dense, the first one too."""
    case = CASES["llama4"]
    text = {**case["text_config"], "moe_layers": [1], "interleave_moe_layer_step": 2}
    monkeypatch.setitem(CASES, "maverick", {**case, "text_config": text})
    return make("maverick", tmp_path / "maverick")


@pytest.mark.parametrize(("stated", "form"), [(FBGEMM, whole), (COMPRESSED, apart)], ids=["fbgemm", "compressed"])
def test_llama_4_in_fp8_is_what_transformers_computes_of_its_numbers(
    maverick: Tiny, kernel_cache: Path, stated: dict[str, Any], form: Any
) -> None:
    in_fp8(maverick, stated, form)
    options = ModelOptions(precision="f32", slots=2, max_length=96, threads=1, cache_dir=kernel_cache)
    model, given = DecodeModel.load(maverick.folder, options, lambda line: None), texts(2, seed=4)
    expected = [reference_logits(maverick, tokens) for tokens in given]
    for text, place, logits in teacher_forced(model, given, [1, 0], seed=4):
        assert (logits - expected[text][place]).abs().max() < LOGITS_TOLERANCE
    answer = given[0][:20]
    logits = model.forward(batch([answer], [0], [0]))
    for length in range(20, 50):
        answer = torch.cat([answer, logits.argmax(dim=1)])
        logits = model.forward(batch([answer[-1:]], [0], [length]))
    best = reference_logits(maverick, answer)[19:-1]
    assert (best.max(dim=1).values - best.gather(1, answer[20:, None])[:, 0]).max() < TIE


def test_experts_in_fp8_need_their_scales(maverick: Tiny) -> None:
    in_fp8(maverick, FBGEMM, whole)
    file = maverick.folder / "model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith("experts.down_proj_scale")]
    save_file({**tensors, name: tensors[name][:, 1:].contiguous()}, file)
    with pytest.raises(
        InvalidInputError, match=r"experts\.down_proj_scale: got \(4, 47, 1\); shape must be \(4, 1, 48\)"
    ):
        WeightFiles(maverick.folder, Architecture.read(maverick.folder))
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(InvalidInputError, match=r"lacks the tensor .*experts\.down_proj_scale"):
        WeightFiles(maverick.folder, Architecture.read(maverick.folder))


def test_fields_of_fbgemm_that_nobody_reads_are_refused(maverick: Tiny) -> None:
    in_fp8(maverick, {**FBGEMM, "rotation": "hadamard"}, whole)
    with pytest.raises(InvalidInputError, match=r"quantization_config.rotation: got 'hadamard'; absent or null"):
        Architecture.read(maverick.folder)
