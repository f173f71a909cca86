"""Llama and what differs from it by a few values: Mistral, Qwen 2 and 3, Phi 3 and 4, OLMo 2, Granite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture, Tensors
from shapeshift.fused_decode.model.families import rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.settings import require


def llama(config: Mapping[str, Any]) -> Architecture:
    stated = Config(config)
    bias = stated.flag("attention_bias")
    return _made(stated, qkv_bias=bias, output_bias=bias, mlp_bias=stated.flag("mlp_bias"))


def mistral(config: Mapping[str, Any]) -> Architecture:
    stated = Config(config)
    stated.refuse("layer_types", "not supported for mistral")
    return _made(stated, windows=(stated.window(),) * stated.count("num_hidden_layers"))


def qwen2(config: Mapping[str, Any]) -> Architecture:
    stated = Config(config)
    return _made(stated, windows=_chosen_windows(stated), qkv_bias=True)


def qwen3(config: Mapping[str, Any]) -> Architecture:
    stated = Config(config)
    bias = stated.flag("attention_bias")
    return _made(stated, windows=_chosen_windows(stated), qkv_bias=bias, output_bias=bias, qk_norm="head")


def phi3(config: Mapping[str, Any]) -> Architecture:
    """Phi 3 and 4. Their first checkpoints call longrope su or yarn."""
    stated = Config(config)
    stated.refuse("attention_bias", "false or absent")
    rope = rope_config.stated(stated)
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        rope |= {"rope_type": "longrope"}
    window = (stated.window(None),) * stated.count("num_hidden_layers")
    tensors = Tensors(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return _made(stated, rope, windows=window, tensors=tensors, norm_eps=stated.positive("rms_norm_eps", 1e-5))


def olmo2(config: Mapping[str, Any]) -> Architecture:
    stated = Config(config)
    bias = stated.flag("attention_bias")
    tensors = Tensors(
        attention_norm="",
        attention_end="post_attention_layernorm",
        mlp_norm="",
        mlp_end="post_feedforward_layernorm",
    )
    eps = stated.positive("rms_norm_eps", 1e-5)
    return _made(stated, qkv_bias=bias, output_bias=bias, qk_norm="row", tensors=tensors, norm_eps=eps)


def granite(config: Mapping[str, Any]) -> Architecture:
    stated = Config(config)
    bias = stated.flag("attention_bias")
    layers = stated.count("num_hidden_layers")
    return _made(
        stated,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=stated.flag("mlp_bias"),
        scales=(stated.positive("attention_multiplier", 1.0),) * layers,
        embedding_scale=stated.positive("embedding_multiplier", 1.0),
        branch_scale=stated.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / stated.positive("logits_scaling", 1.0),
    )


def _made(stated: Config, rope: dict[str, Any] | None = None, **own: Any) -> Architecture:
    """The architecture with the fields `own`, and Llama's otherwise; rope: what the file states of it."""
    size = stated.size()
    layers, head_dim = size["layers"], size["head_dim"]
    # Other families would rotate a part of a head that transformers cannot.
    partial = size["family"] == "phi3"
    given = rope_config.stated(stated) if rope is None else rope
    found, longest = rope_config.read(stated, given, head_dim, size["max_position"], partial)
    plain = {
        "intermediate": stated.count("intermediate_size"),
        "norm_eps": stated.positive("rms_norm_eps", 1e-6),
        "max_position": longest,
        "windows": (0,) * layers,
        "ropes": (found,) * layers,
        "scales": (head_dim**-0.5,) * layers,
        "activation": stated.activation("hidden_act", "silu", "silu"),
        "tied": stated.flag("tie_word_embeddings"),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
    }
    return Architecture(**(size | plain | own))


def _chosen_windows(stated: Config) -> tuple[int, ...]:
    """Qwen's: only with use_sliding_window, and only for the layers from max_window_layers on."""
    layers = stated.count("num_hidden_layers")
    window = stated.window() if stated.flag("use_sliding_window") else 0
    if not window:
        return (0,) * layers
    first = stated.get("max_window_layers", 28)
    require(isinstance(first, int), "max_window_layers", first, "a whole number")
    return stated.windows(layers, window, [window if layer >= first else 0 for layer in range(layers)])
