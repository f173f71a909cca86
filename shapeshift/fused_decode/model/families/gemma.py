"""Gemma, since 2 with norms before and after each branch, layers with a window, and capped or normalised scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.parts import Tensors
from shapeshift.settings import require

TENSORS = Tensors(
    attention_end="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_end="post_feedforward_layernorm",
)


def gemma(values: Mapping[str, Any]) -> Architecture:
    """Its first checkpoints call the activation gelu, as `hidden_act`."""
    config = Config({**values, "hidden_activation": values.get("hidden_activation") or "gelu_pytorch_tanh"})
    act = config.get("hidden_act", "gelu")
    require(act in ("gelu", "gelu_pytorch_tanh"), "hidden_act", act, "gelu or gelu_pytorch_tanh")
    size = config.size()
    rope, longest = _rope(config, rope_config.values_of(config))
    return with_fields(
        config,
        windows=(0,) * size["layers"],
        ropes=(rope,) * size["layers"],
        max_position=longest,
        scales=(size["head_dim"] ** -0.5,) * size["layers"],
        tensors=Tensors(),
    )


def gemma2(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    layers = config.layers()
    window = config.window()
    every_other = [window if layer % 2 == 0 else 0 for layer in range(layers)]
    rope, longest = _rope(config, rope_config.values_of(config))
    return with_fields(
        config,
        windows=config.windows(layers, window, every_other),
        ropes=(rope,) * layers,
        max_position=longest,
        score_cap=config.cap("attn_logit_softcapping", 50.0),
        logit_cap=config.cap("final_logit_softcapping", 30.0),
    )


def gemma3_text(values: Mapping[str, Any]) -> Architecture:
    """Layers with a window have a rope of their own."""
    config = Config(values)
    windows = config.windows_in_turns(config.window(), config.count("sliding_window_pattern", 6))
    whole, near = rope_config.by_window(rope_config.values_of(config))
    near = near or {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    far, longest = _rope(config, {"rope_theta": 1e6} | whole)
    local, _ = _rope(config, {"rope_theta": 1e4} | near)
    return with_fields(
        config,
        windows=windows,
        ropes=tuple(local if window else far for window in windows),
        max_position=longest,
        qk_norm="head",
        score_cap=config.cap("attn_logit_softcapping"),
        logit_cap=config.cap("final_logit_softcapping"),
    )


def _rope(config: Config, values: Mapping[str, Any]) -> Any:
    size = config.size()
    return rope_config.read(config, values, size["head_dim"], size["max_position"])


def with_fields(config: Config, **fields: Any) -> Architecture:
    # That of images beside the text changes nothing here.
    both_ways = config.get("use_bidirectional_attention")
    allowed = "false, vision or absent: an encoder generates no text"
    require(both_ways in (None, False, "vision"), "use_bidirectional_attention", both_ways, allowed)
    size = config.size()
    bias = config.flag("attention_bias")
    plain = {
        "intermediate": config.count("intermediate_size"),
        "norm_eps": config.positive("rms_norm_eps", 1e-6),
        "scales": (config.positive("query_pre_attn_scalar", 256) ** -0.5,) * size["layers"],
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh"),
        "tied": config.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
        "norm_offset": 1.0,
        "embedding_scale": size["hidden"] ** 0.5,
        "tensors": TENSORS,
    }
    return Architecture(**(size | plain | fields))
