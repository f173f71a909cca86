"""Small random checkpoints of every family that fused_decode serves, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fused_decode.decode_models import VOCAB, WINDOW, Tiny

ORIGINAL = 40
"""Tokens of the texts of the training before a rope was scaled; the tests' texts are shorter and longer."""

_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_GPT: dict[str, Any] = {**_COMMON, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}
_NEOX: dict[str, Any] = {**_WIDE, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
_YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_MINISTRAL3 = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e3,
    "short_factor": [1.0, 1.2, 1.5, 1.8],
    "long_factor": [1.5, 2.5, 4.0, 6.0],
    "partial_rotary_factor": 2 / 3,
}

_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 20.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    },
}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e3, "alpha": 8.0, "factor": 1.0}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
_GROUPS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

# Without a large epsilon, a random state that holds little is all that its norm leaves of it, rounding included.
_HYBRID: dict[str, Any] = {
    **_WIDE,
    "head_dim": 16,
    "rms_norm_eps": 1e-2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

# The configuration of each family in `shapeshift.fused_decode.model.architecture.FAMILIES`, by model_type.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3},
    "mistral": {**_WIDE, "sliding_window": WINDOW},
    "ministral": {
        **_WIDE,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "ministral3": {**_WIDE, "head_dim": 16, "rope_parameters": _MINISTRAL3},
    "qwen2": {**_WIDE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {**_WIDE, "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": _YARN},
    "phi3": {
        **_WIDE,
        "sliding_window": WINDOW,
        "original_max_position_embeddings": ORIGINAL,
        "rope_parameters": _LONGROPE,
    },
    "smollm3": {**_WIDE, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    "olmo2": {**_WIDE, "attention_bias": True},
    "olmo3": {
        **_WIDE,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    },
    "seed_oss": {**_WIDE, "head_dim": 16, "attention_bias": True, "attention_out_bias": False, "mlp_bias": True},
    "arcee": {**_WIDE, "attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN},
    "helium": {**_WIDE, "head_dim": 12, "attention_bias": True},
    "ernie4_5": {**_WIDE, "head_dim": 16, "use_bias": True},
    "glm": {**_WIDE, "head_dim": 16, "attention_bias": True},
    "glm4": {**_WIDE, "head_dim": 16, "attention_bias": False, "rope_parameters": {"partial_rotary_factor": 0.25}},
    "cwm": {
        **_WIDE,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": _LLAMA3,
    },
    "exaone4": {
        **_WIDE,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "granite": {**_WIDE, **_GRANITE, "attention_bias": True},
    "hyperclovax": {**_WIDE, **_GRANITE, "attention_multiplier": None},
    "internlm3": {**_WIDE, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": _DYNAMIC},
    "hunyuan_v1_dense": {**_WIDE, "head_dim": 16, "attention_bias": True, "rope_parameters": _ALPHA},
    "mixtral": {**_WIDE, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "qwen3_moe": {
        **_WIDE,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        **_WIDE,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "olmoe": {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "ernie4_5_moe": {
        **_WIDE,
        "head_dim": 16,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
    },
    "hunyuan_v1_moe": {**_WIDE, "head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "llama4_text": {
        **_WIDE,
        "head_dim": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 80,
        "moe_layers": [0, 1],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 16,
        "floor_scale": 12,
        "attn_scale": 0.5,
        "rope_parameters": _LLAMA3,
    },
    "minimax_m2": {**_WIDE, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    "granitemoe": {**_WIDE, **_GRANITE, "num_local_experts": 6},
    "granitemoeshared": {**_WIDE, **_GRANITE, "num_local_experts": 6, "shared_intermediate_size": 40},
    "granitemoehybrid": {
        **_WIDE,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope",
        **_GRANITE,
        "mamba_n_heads": 12,
    },
    "gpt_oss": {
        **_WIDE,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "swiglu_limit": 1.5,
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "qwen3_5_text": {**_HYBRID, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {**_HYBRID, **_SHARED_EXPERT},
    "qwen3_next": {**_HYBRID, **_SHARED_EXPERT, "mlp_only_layers": [0]},
    "glm4_moe": {**_WIDE, **_GROUPS, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    "solar_open": {**_WIDE, **_GROUPS, "head_dim": 16},
    "dots1": {
        **_WIDE,
        **_GROUPS,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "attention_bias": True,
    },
    "exaone_moe": {
        **_WIDE,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "hy_v3": {
        **_WIDE,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 24,
    },
    "phi": {**_WIDE, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "default", "rope_theta": 1e3}},
    "starcoder2": {**_WIDE, "use_bias": True, "sliding_window": WINDOW},
    "stablelm": {**_WIDE, "use_qkv_bias": True, "rope_parameters": {"partial_rotary_factor": 0.5}},
    "nemotron": {**_WIDE, "attention_bias": True, "mlp_bias": True},
    "cohere": {**_WIDE, "attention_bias": True, "logit_scale": 0.25},
    "cohere2": {
        **_WIDE,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma": {**_WIDE, "head_dim": 16},
    "gemma2": {
        **_WIDE,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **_WIDE,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    },
    "gemma4_text": {
        **_WIDE,
        **_GEMMA4,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gpt2": {**_GPT, "scale_attn_by_inverse_layer_idx": True},
    "gptj": {**_GPT, "rotary_dim": 8},
    "gpt_neox": _NEOX,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
_MROPE = {"rope_theta": 1e3, "mrope_section": [2, 2, 2]}
# Further settings of these families.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, dynamic rope": {
        **_WIDE,
        "model_type": "llama",
        "max_position_embeddings": ORIGINAL,
        "rope_parameters": _DYNAMIC,
    },
    "llama, linear rope": {**_WIDE, "model_type": "llama", "rope_parameters": _LINEAR},
    "granitemoehybrid, without positions": {
        **_WIDE,
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "layer_types": ["full_attention"] * 3,
        "mamba_n_heads": 12,
    },
    "granitemoehybrid, with experts": {
        **_WIDE,
        **_GRANITE,
        "model_type": "granitemoehybrid",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "layer_types": ["full_attention"] * 3,
        "mamba_n_heads": 12,
    },
    "exaone4, without windows": {
        **_WIDE,
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
    },
    "stablelm, side by side": {
        **_WIDE,
        "model_type": "stablelm",
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.5,
    },
    "phi3, without longrope": {**_WIDE, "model_type": "phi3", "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {**CONFIGS["gemma3_text"], "model_type": "gemma3_text"},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "gemma4_text, with experts": {
        **_WIDE,
        **_GEMMA4,
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {**CONFIGS["gemma4_text"], "model_type": "gemma4_text"},
        "vision_config": {**_VISION, "model_type": "gemma4_vision", "head_dim": 8},
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified",
        "text_config": {
            **{key: value for key, value in CONFIGS["gemma4_text"].items() if "per_layer_input" not in key},
            "model_type": "gemma4_unified_text",
        },
        "vision_config": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 16, "mm_posemb_size": 8},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            **_WIDE,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {**_MROPE, "rope_type": "default"},
        },
        "vision_config": {**_QWEN_VISION, "model_type": "qwen2_5_vl", "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            **CONFIGS["qwen3"],
            "model_type": "qwen3_vl_text",
            "rope_parameters": {**_MROPE, "rope_type": "default"},
        },
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_vl_vision", "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **CONFIGS["qwen3_moe"],
            "model_type": "qwen3_vl_moe_text",
            "mlp_only_layers": [1],
            "rope_parameters": {**_MROPE, "rope_type": "default"},
        },
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_vl_moe_vision", "deepstack_visual_indexes": [0]},
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {**CONFIGS["llama4_text"], "model_type": "llama4_text"},
        "vision_config": {**_VISION, "model_type": "llama4_vision_model", "vision_output_dim": 16},
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {**CONFIGS["ministral3"], "model_type": "ministral3"},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {**_HYBRID, **_SHARED_EXPERT, "model_type": "qwen3_5_moe_text"},
        "vision_config": _QWEN_VISION,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **_HYBRID,
            "model_type": "qwen3_5_text",
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
        },
        "vision_config": _QWEN_VISION,
    },
    "gpt_neox, one branch after the other": {**_NEOX, "model_type": "gpt_neox", "use_parallel_residual": False},
    "gpt2, head of its own": {**_GPT, "model_type": "gpt2", "tie_word_embeddings": False},
}
VARIANTS["qwen3_vl_moe, saved anew"] = VARIANTS["qwen3_vl_moe"]
CASES = {**{name: {**options, "model_type": name} for name, options in CONFIGS.items()}, **VARIANTS}


MIXTURES = tuple(
    name for name, options in CASES.items() if any(key.endswith("experts") and value for key, value in options.items())
)


def make(name: str, folder: Path) -> Tiny:
    """The model of one of CASES. Its attention is sharp, and all biases and norms matter."""
    import transformers

    options = dict(CASES[name])
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(len(name))
    kind = transformers.AutoModelForImageTextToText if "vision_config" in options else transformers.AutoModelForCausalLM
    reference = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter, tensor in reference.named_parameters():
            offset = name.startswith(("gemma", "nemotron", "qwen3_5", "qwen3_next")) and not name.startswith("gemma4")
            tensor.copy_(_random(parameter, tensor, offset))
        for buffer, tensor in reference.named_buffers():
            if buffer.endswith("layer_scalar"):
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
            if buffer.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
    transformers.utils.logging.disable_progress_bar()
    reference.save_pretrained(folder)
    if name == "qwen3_vl_moe":
        # As published; transformers reads both and writes the other.
        file = folder / "model.safetensors"
        tensors = {key: one.mT.contiguous() if ".experts." in key else one for key, one in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return Tiny(name, reference, folder)


def _random(parameter: str, tensor: torch.Tensor, offset: bool) -> torch.Tensor:
    """Random values of a parameter; offset: norms add 1 to their weights."""
    values = torch.randn(tensor.shape)
    if tensor.dim() == 1:
        is_norm = "bias" not in parameter
        return values * 0.3 + (1.0 if is_norm and not offset else 0.0)
    if "embed" in parameter or parameter.endswith(("wte.weight", "wpe.weight")):
        return values
    queries_and_keys = any(part in parameter for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn"))
    return values * (1.6 if queries_and_keys else 1.0) / min(tensor.shape[-2:]) ** 0.5


def reference_logits(tiny: Tiny, tokens: torch.Tensor) -> torch.Tensor:
    """Logits FLOAT32 [tokens, vocabulary] of transformers for one text."""
    with torch.inference_mode():
        # A dynamic rope keeps the frequencies of a longer text until a short one comes.
        tiny.reference(tokens[None, :1])
        logits: torch.Tensor = tiny.reference(tokens[None]).logits[0]
    return logits
