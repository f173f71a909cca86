"""Llama and what differs from it by a few values: Mistral, Ministral, SmolLM, Qwen, Phi 3 and 4, OLMo, Granite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture, Tensors
from shapeshift.fused_decode.model.families import rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.settings import require


def llama(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    bias = config.flag("attention_bias")
    return with_fields(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    config.refuse("layer_types", "not supported for mistral")
    return with_fields(config, windows=(config.window(),) * config.count("num_hidden_layers"))


def ministral(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    layers, window = config.count("num_hidden_layers"), config.window()
    return with_fields(config, windows=config.windows(layers, window, [window] * layers))


def ministral3(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    rope = rope_config.values_of(config)
    beta = rope.get("llama_4_scaling_beta") or 0.0
    return with_fields(
        config,
        windows=(config.window(None),) * config.count("num_hidden_layers"),
        query_growth=rope_config.positive(rope, "llama_4_scaling_beta") if beta else 0.0,
        query_span=Config(rope).count("original_max_position_embeddings") if beta else 0,
        norm_eps=config.positive("rms_norm_eps", 1e-5),
    )


def smollm3(values: Mapping[str, Any]) -> Architecture:
    """Some layers have no positions; those alone may have a window."""
    config = Config(values)
    layers, bias = config.count("num_hidden_layers"), config.flag("attention_bias")
    interval = config.count("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    fits = isinstance(turns, list) and len(turns) == layers and all(turn in (0, 1) for turn in turns)
    require(fits, "no_rope_layers", turns, f"{layers} of 0 and 1: whether a layer has rotary positions")
    window = config.window(None) if config.flag("use_sliding_window") else 0
    windows = config.windows(layers, window, [0 if turn else window for turn in turns])
    whole = with_fields(
        config,
        {"rope_theta": 2e6} | rope_config.values_of(config),
        windows=windows,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        tied=config.flag("tie_word_embeddings", True),
    )
    ropes = tuple(rope if turn else None for rope, turn in zip(whole.ropes, turns, strict=True))
    return replace(whole, ropes=ropes)


def qwen2(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    return with_fields(config, windows=_chosen_windows(config), qkv_bias=True)


def qwen3(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    bias = config.flag("attention_bias")
    return with_fields(config, windows=_chosen_windows(config), qkv_bias=bias, output_bias=bias, qk_norm="head")


def phi3(values: Mapping[str, Any]) -> Architecture:
    """Phi 3 and 4. Their first checkpoints call longrope su or yarn."""
    config = Config(values)
    config.refuse("attention_bias", "false or absent")
    rope = rope_config.values_of(config)
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        rope |= {"rope_type": "longrope"}
    window = (config.window(None),) * config.count("num_hidden_layers")
    tensors = Tensors(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return with_fields(config, rope, windows=window, tensors=tensors, norm_eps=config.positive("rms_norm_eps", 1e-5))


def olmo2(values: Mapping[str, Any]) -> Architecture:
    return _olmo(Config(values))


def olmo3(values: Mapping[str, Any]) -> Architecture:
    """Layers with a window have a rope without scaling."""
    config = Config(values)
    layers, window = config.count("num_hidden_layers"), config.window()
    windows = config.windows(layers, window, [window if (layer + 1) % 4 else 0 for layer in range(layers)])
    whole, near = rope_config.by_window(rope_config.values_of(config), "rope_theta")
    far = _olmo(config, {"rope_theta": 5e5} | whole)
    local = _olmo(config, {"rope_theta": 5e5} | near).ropes[0]
    return replace(far, windows=windows, ropes=tuple(local if width else far.ropes[0] for width in windows))


def _olmo(config: Config, rope_values: dict[str, Any] | None = None) -> Architecture:
    bias, eps = config.flag("attention_bias"), config.positive("rms_norm_eps", 1e-5)
    tensors = Tensors(
        attention_norm="",
        attention_end="post_attention_layernorm",
        mlp_norm="",
        mlp_end="post_feedforward_layernorm",
    )
    return with_fields(
        config, rope_values, qkv_bias=bias, output_bias=bias, qk_norm="row", tensors=tensors, norm_eps=eps
    )


def granite(values: Mapping[str, Any]) -> Architecture:
    return _granite(Config(values))


def granite4(values: Mapping[str, Any]) -> Architecture:
    """Granite 4 without experts and without Mamba's layers."""
    config = Config(values)
    layers = config.count("num_hidden_layers")
    experts = config.get("num_local_experts", 8)
    require(experts == 0, "num_local_experts", experts, "0: experts beside a shared one are not served")
    kinds = config.get("layer_types", config.get("layers_block_type"))
    allowed = f"{layers} of full_attention or attention: layers of Mamba are not served"
    plain = isinstance(kinds, list) and all(kind in ("full_attention", "attention") for kind in kinds)
    require(plain and len(kinds) == layers, "layer_types", kinds, allowed)
    positions = config.get("position_embedding_type")
    require(positions in ("rope", "nope", None), "position_embedding_type", positions, "rope, nope or null")
    dense = _granite(Config({**values, "mlp_bias": False}, intermediate_size="shared_intermediate_size"))
    tensors = Tensors(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
    return replace(dense, tensors=tensors, ropes=dense.ropes if positions == "rope" else (None,) * layers)


def _granite(config: Config) -> Architecture:
    bias = config.flag("attention_bias")
    layers = config.count("num_hidden_layers")
    return with_fields(
        config,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        scales=(config.positive("attention_multiplier", 1.0),) * layers,
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        branch_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / config.positive("logits_scaling", 1.0),
    )


def with_fields(config: Config, rope_values: dict[str, Any] | None = None, **fields: Any) -> Architecture:
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
