"""Writes compressed_linears.safetensors: a linear in each scheme of compressed-tensors, and what that library reads.

Run where `pip install compressed-tensors==0.20.0 loguru` is: python -m tests.fused_decode.compressed_linears
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".safetensors")
OUTPUTS, INPUTS = 16, 64
_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "W4A16": (_GROUPS, None),
    "W4A16_ASYM": ({**_GROUPS, "symmetric": False}, None),
    "W8A16": ({"num_bits": 8, "type": "int", "strategy": "channel"}, None),
    "W8A8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, _ROWS),
    "FP8_DYNAMIC": ({**_FLOAT, "strategy": "channel"}, {**_FLOAT, "strategy": "token", "dynamic": True}),
    "FP8": ({**_FLOAT, "strategy": "tensor"}, {**_FLOAT, "strategy": "tensor", "dynamic": False}),
    "FP8_BLOCK": ({**_FLOAT, "strategy": "block", "block_structure": [8, 32]}, None),
}
"""Weights and activations of each scheme."""


def write() -> None:
    import torch
    from safetensors.torch import save_file

    # No requirement of the project.
    library = importlib.import_module("compressed_tensors")
    compressors = importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    ranges = importlib.import_module("compressed_tensors.quantization.utils")

    tensors: dict[str, torch.Tensor] = {}
    stated = {"version": library.__version__}
    for name, (weights, activations) in SCHEMES.items():
        torch.manual_seed(len(name))
        linear: Any = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        model = torch.nn.Sequential(linear)
        config = quantization.QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
        quantization.apply_quantization_config(model, config)
        rows, columns = weights.get("block_structure", {"tensor": (OUTPUTS, INPUTS)}.get(weights["strategy"], (1, 0)))
        columns = columns or weights.get("group_size", INPUTS)
        parts = linear.weight.detach().view(OUTPUTS // rows, rows, INPUTS // columns, columns)
        scales, zeros = ranges.calculate_qparams(
            parts.amin(dim=(1, 3)), parts.amax(dim=(1, 3)), linear.quantization_scheme.weights
        )
        linear.weight_scale.data = scales.view(linear.weight_scale.shape)
        if hasattr(linear, "weight_zero_point"):
            linear.weight_zero_point.data = zeros.to(torch.int8).view(linear.weight_zero_point.shape)
        compressors.compress_module(linear)
        tensors |= {f"{name}.{part}": value.clone() for part, value in linear.state_dict().items()}
        stated[name] = quantization.QuantizationConfig.from_pretrained(model).model_dump_json()
        compressors.decompress_module(linear)
        tensors[f"{name}.read"] = linear.weight.detach().float()
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, stated)


if __name__ == "__main__":
    write()
