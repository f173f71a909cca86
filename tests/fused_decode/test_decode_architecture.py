"""config.json as an architecture, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import FAMILIES, Architecture, from_config
from shapeshift.fused_decode.model.kv_cache import frequencies
from shapeshift.fused_decode.model.parts import Rope
from tests.fused_decode.families import CASES
from tests.sampling import few

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
GRANITE4 = {
    "model_type": "granitemoehybrid",
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["attention"] * 4,
    "position_embedding_type": "rope",
}


def test_an_old_config_without_the_newer_keys() -> None:
    found = from_config(OLD_LLAMA)
    assert (found.heads, found.kv_heads, found.head_dim, found.windows) == (6, 6, 8, (0, 0, 0, 0))
    assert (found.ropes, found.norm_eps, found.eos_ids) == ((Rope(500.0, rotated=8),) * 4, 1e-6, {2, 5})
    assert (found.tied, found.qkv_bias, found.output_bias, found.qk_norm) == (False, False, False, "")
    assert found.is_one_operation


def test_end_of_sequence_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OLD_LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Architecture.read(tmp_path).eos_ids == {2, 5, 7}
    # As Gemma 4, whose text model has no end of a turn.
    inner = {**CASES["gemma4"]["text_config"], "eos_token_id": 1}
    assert from_config({**CASES["gemma4"], "text_config": inner, "eos_token_id": [1, 106]}).eos_ids == {1, 106}


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
        ({"model_type": "mamba"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [0.0] * 4}}, "long_factor"),
        ({"model_type": "gemma3"}, "model_type"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "hidden_activation": "tanh"}, "hidden_activation"),
        ({"model_type": "gpt_neox", "rotary_pct": 0.2}, "partial_rotary_factor"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "gpt2"}, "n_embd"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 3}}, "high_freq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": 128}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        (WINDOWED | {"sliding_window": 0}, "sliding_window"),
        (WINDOWED | {"layer_types": ["full_attention"]}, "layer_types"),
        (WINDOWED | {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ({"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta"),
        ({"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": 0.1}}, "original_max_position"),
        (
            {
                "model_type": "ministral3",
                "rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 0.5},
            },
            "original_max_position",
        ),
        (GRANITE4 | {"num_local_experts": 2000}, "num_local_experts"),
        ({"model_type": "mistral3", "text_config": {"model_type": "rwkv"}}, "model_type"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "num_hidden_layers"),
        (GRANITE4 | {"layer_types": ["mamba", "attention"] * 2}, "layer_types"),
        (GRANITE4 | {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}"):
        from_config(OLD_LLAMA | changes)


def test_every_causal_model_of_transformers_is_served_or_refused_with_a_reason() -> None:
    """By the configuration of its class, with all values that it has by default."""
    outcomes = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.CONFIG_MAPPING[kind]()
            stated = json.loads(config.to_json_string(use_diff=False))
        except Exception:  # noqa: BLE001  some classes have no defaults that they accept
            stated = {}
        # Those of some classes lie beyond the vocabularies that they have by default.
        stated |= {"model_type": stated.get("model_type", kind), "eos_token_id": 2}
        try:
            outcomes[kind] = from_config(stated).family
        except InvalidInputError as error:
            outcomes[kind] = f"refused: {error}"
    served = {family for family in outcomes.values() if not family.startswith("refused")}
    assert "layer_types: got" in outcomes.pop("granitemoehybrid"), "by default its layers are Mamba's"
    assert "n_routed_experts: got" in outcomes.pop("dots1"), "by default it states no experts"
    assert "num_attention_heads: got" in outcomes.pop("glm4_moe"), "by default no heads fit its states"
    assert served == FAMILIES.keys() - {"granitemoehybrid", "dots1", "glm4_moe"}
    refused = {kind: text for kind, text in outcomes.items() if text.startswith("refused")}
    assert len(refused) > 100 and all(text.startswith("refused: model_type: got") for text in refused.values())
    for kind, reason in (
        ("gemma3n", "several states of each token"),
        ("mamba2", "layers that are no attention"),
        ("olmo_hybrid", "layers that are no attention"),
        ("deepseek_v3", "latent attention"),
        ("afmoe", "a mixture of experts of another form"),
    ):
        assert f"got '{kind}'; this one has {reason}" in refused[kind]


JUNK: tuple[Any, ...] = (
    None,
    "x",
    "",
    [],
    {},
    -1,
    0,
    1,
    1.5,
    1e-9,
    1e30,
    True,
    False,
    [1],
    [[]],
    {"a": 1},
    float("nan"),
)


@pytest.mark.parametrize("case", few(CASES, ("llama", "gemma2", "gpt_oss", "qwen3_5_text", "llama, dynamic rope")))
def test_a_config_with_any_value_is_read_or_refused(case: str) -> None:
    """And what is read makes tables and names."""
    config = CASES[case]

    def check(changed: dict[str, Any]) -> None:
        with contextlib.suppress(InvalidInputError):
            made = from_config(changed)
            sizes = {(rope, made.layer(layer).head_dim) for layer, rope in enumerate(made.ropes) if rope}
            for rope, head_dim in sizes:
                assert frequencies(rope, head_dim, 50).isfinite().all()

    nested = {key: value for key, value in config.items() if isinstance(value, dict)}
    for junk in JUNK:
        for key in config:
            check({**config, key: junk})
        for key, value in nested.items():
            for inner in (*value, "rope_type", "factor", "original_max_position_embeddings", "attention_factor"):
                check({**config, key: {**value, inner: junk}})


def test_values_of_a_text_model_may_stand_beside_those_of_images() -> None:
    inner = CASES["qwen2_5_vl"]["text_config"]
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}, "rope_theta": 1e3, "rope_parameters": None}
    flat = from_config({**inner, **rope, "model_type": "qwen2_vl", "tie_word_embeddings": False})
    nested = from_config({**CASES["qwen2_5_vl"], "tie_word_embeddings": False})
    assert flat == nested and flat.family == "qwen2"


def test_keys_and_values_that_no_layer_uses_may_be_in_the_files() -> None:
    others = from_config(CASES["gemma4"]).tensors.others
    assert "model.layers.5.self_attn.k_proj" in others and "model.layers.2.self_attn.k_proj" not in others
    assert "model.vision_tower." in others


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidInputError, match="^checkpoint: got"):
        Architecture.read(tmp_path)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e3,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    },
    "llama3, with one limit": {
        "rope_type": "llama3",
        "rope_theta": 5e3,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 48,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48},
    "yarn, all settings": {
        "rope_type": "yarn",
        "rope_theta": 5e3,
        "factor": 4.0,
        "original_max_position_embeddings": 48,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.9,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn, amplitude": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 48,
        "attention_factor": 1.3,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 48,
        "short_factor": [1.0 + 0.1 * pair for pair in range(32)],
        "long_factor": [2.0 + 0.3 * pair for pair in range(32)],
    },
    "longrope, all settings": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 48,
        "short_factor": [1.0] * 32,
        "long_factor": [4.0] * 32,
        "factor": 2.0,
        "attention_factor": 1.1,
    },
}


@pytest.mark.parametrize("length", [40, 64, 65, 200])
@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_transformers(kind: str, length: int) -> None:
    stated = ROPES[kind]
    config = transformers.LlamaConfig(**(OLD_LLAMA | {"head_dim": 64, "rope_parameters": dict(stated)}))
    expected, amplitude = ROPE_INIT_FUNCTIONS[stated["rope_type"]](config, torch.device("cpu"), seq_len=length)
    rope = from_config(config.to_dict()).ropes[0]
    assert rope is not None and rope.amplitude == pytest.approx(amplitude)
    assert torch.allclose(frequencies(rope, 64, length), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("kind", "longest"), [("linear", 64), ("yarn", 192), ("dynamic", 128), ("longrope", 64), ("llama3", 64)]
)
def test_yarn_and_dynamic_stretch_the_longest_text(kind: str, longest: int) -> None:
    changed = {"head_dim": 64, "rope_scaling": ROPES[kind]}
    assert from_config(OLD_LLAMA | changed).max_position == longest


def test_an_older_phi_calls_longrope_otherwise() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    old = OLD_LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 32}
    for name in ("su", "yarn", "longrope"):
        rope = from_config(old | {"rope_scaling": {"type": name, **factors}}).ropes[0]
        assert rope is not None and (rope.kind, rope.original, rope.long) == ("longrope", 32, (2.0,) * 4)


def test_older_gemma_3_states_its_ropes_and_windows_otherwise() -> None:
    old = OLD_LLAMA | {
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    }
    found = from_config(old)
    assert found.windows == (16, 0, 16, 0) and found.tied
    far = Rope(1e6, "linear", 8.0, rotated=8)
    assert found.ropes == (Rope(1e4, rotated=8), far, Rope(1e4, rotated=8), far)


def test_older_olmo_3_scales_the_rope_of_layers_without_a_window() -> None:
    scaling = {key: value for key, value in ROPES["yarn"].items() if key != "rope_theta"}
    older = {"model_type": "olmo3", "head_dim": 64, "sliding_window": 8, "rope_theta": 5e5, "rope_scaling": scaling}
    made = from_config(OLD_LLAMA | older)
    assert made.windows == (8, 8, 8, 0)
    assert [rope and rope.kind for rope in made.ropes] == ["default", "default", "default", "yarn"]
    assert {rope and rope.theta for rope in made.ropes} == {5e5}


def test_an_older_gpt_neox_states_its_rope_otherwise() -> None:
    old = OLD_LLAMA | {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 2e4}
    del old["rope_theta"]
    assert from_config(old).ropes == (Rope(2e4, rotated=4),) * 4


def test_which_families_run_as_one_operation() -> None:
    one = {name for name in FAMILIES if from_config(CASES[name]).is_one_operation}
    assert one == {
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "phi3", "smollm3"),
        *("seed_oss", "helium", "ernie4_5", "glm", "cwm", "internlm3"),
    }
    assert from_config(OLD_LLAMA | {"model_type": "granite"}).is_one_operation
    assert not from_config(OLD_LLAMA | {"model_type": "granite", "residual_multiplier": 0.2}).is_one_operation
