"""config.json as an architecture, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import Architecture, Rope, from_config
from shapeshift.fused_decode.model.network import rope_frequencies

OLD_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "eos_token_id": [2, 5],
}
WINDOWED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "num_key_value_heads": 2}


def test_an_old_config_without_the_newer_keys() -> None:
    found = from_config(OLD_LLAMA)
    assert (found.heads, found.kv_heads, found.head_dim, found.windows) == (6, 6, 8, (0, 0, 0, 0))
    assert (found.rope, found.norm_eps, found.eos_ids) == (Rope(500.0), 1e-6, {2, 5})
    assert (found.tied, found.qkv_bias, found.output_bias, found.qk_norm) == (False, False, False, False)


def test_end_of_sequence_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OLD_LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Architecture.read(tmp_path).eos_ids == {2, 5, 7}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0, 0, 0)),
        ({"max_window_layers": 3}, (0, 0, 0, 8)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, (8, 0, 8, 0)),
        ({"max_window_layers": 0, "use_sliding_window": False}, (0, 0, 0, 0)),
        ({"model_type": "mistral"}, (8, 8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0, 0, 0)),
    ],
)
def test_windows_of_layers(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert from_config(OLD_LLAMA | WINDOWED | changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "gemma"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}}, "high_freq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": 128}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        (WINDOWED | {"sliding_window": 0}, "sliding_window"),
        (WINDOWED | {"layer_types": ["full_attention"]}, "layer_types"),
        (WINDOWED | {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "layer_types"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}"):
        from_config(OLD_LLAMA | changes)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidInputError, match="^checkpoint: got"):
        Architecture.read(tmp_path)


@pytest.mark.parametrize(
    "stated",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e3,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 48,
        },
    ],
    ids=["linear", "llama3"],
)
def test_frequencies_are_those_of_transformers(stated: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**(OLD_LLAMA | {"head_dim": 64, "rope_parameters": dict(stated)}))
    expected, factor = ROPE_INIT_FUNCTIONS[stated["rope_type"]](config, torch.device("cpu"))
    found = rope_frequencies(from_config(config.to_dict()).rope, 64)
    assert factor == 1.0
    assert torch.allclose(found, expected, rtol=1e-5, atol=0.0)
