"""Llama and what differs from it by a few values: Mistral, Qwen 2 and 3, Phi 3 and 4, OLMo 2, Granite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture, Tensors
from shapeshift.fused_decode.model.families import rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.settings import require


def llama(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    bias = config.flag("attention_bias")
    return _architecture(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    config.refuse("layer_types", "not supported for mistral")
    return _architecture(config, windows=(config.window(),) * config.count("num_hidden_layers"))


def qwen2(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    return _architecture(config, windows=_chosen_windows(config), qkv_bias=True)


def qwen3(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    bias = config.flag("attention_bias")
    return _architecture(config, windows=_chosen_windows(config), qkv_bias=bias, output_bias=bias, qk_norm="head")


def phi3(values: Mapping[str, Any]) -> Architecture:
    """Phi 3 and 4. Their first checkpoints call longrope su or yarn."""
    config = Config(values)
    config.refuse("attention_bias", "false or absent")
    rope = rope_config.values_of(config)
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        rope |= {"rope_type": "longrope"}
    window = (config.window(None),) * config.count("num_hidden_layers")
    tensors = Tensors(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return _architecture(config, rope, windows=window, tensors=tensors, norm_eps=config.positive("rms_norm_eps", 1e-5))


def olmo2(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    bias = config.flag("attention_bias")
    tensors = Tensors(
        attention_norm="",
        attention_end="post_attention_layernorm",
        mlp_norm="",
        mlp_end="post_feedforward_layernorm",
    )
    eps = config.positive("rms_norm_eps", 1e-5)
    return _architecture(config, qkv_bias=bias, output_bias=bias, qk_norm="row", tensors=tensors, norm_eps=eps)


def granite(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    bias = config.flag("attention_bias")
    layers = config.count("num_hidden_layers")
    return _architecture(
        config,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        scales=(config.positive("attention_multiplier", 1.0),) * layers,
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        branch_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / config.positive("logits_scaling", 1.0),
    )


def _architecture(config: Config, rope_values: dict[str, Any] | None = None, **fields: Any) -> Architecture:
    """The architecture with these fields, and Llama's otherwise; rope_values: what the file states of it."""
    size = config.size()
    layers, head_dim = size["layers"], size["head_dim"]
    # Other families would rotate a part of a head that transformers cannot.
    partial = size["family"] == "phi3"
    if rope_values is None:
        rope_values = rope_config.values_of(config)
    rope, longest = rope_config.read(config, rope_values, head_dim, size["max_position"], partial)
    plain = {
        "intermediate": config.count("intermediate_size"),
        "norm_eps": config.positive("rms_norm_eps", 1e-6),
        "max_position": longest,
        "windows": (0,) * layers,
        "ropes": (rope,) * layers,
        "scales": (head_dim**-0.5,) * layers,
        "activation": config.activation("hidden_act", "silu", "silu"),
        "tied": config.flag("tie_word_embeddings"),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
    }
    return Architecture(**(size | plain | fields))


def _chosen_windows(config: Config) -> tuple[int, ...]:
    """Qwen's: only with use_sliding_window, and only for the layers from max_window_layers on."""
    layers = config.count("num_hidden_layers")
    window = config.window() if config.flag("use_sliding_window") else 0
    if not window:
        return (0,) * layers
    first = config.get("max_window_layers", 28)
    require(isinstance(first, int), "max_window_layers", first, "a whole number")
    return config.windows(layers, window, [window if layer >= first else 0 for layer in range(layers)])
