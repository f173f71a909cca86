"""Gemma 2 and 3: norms before and after each branch, some layers with a window, capped or normalised scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture, Tensors
from shapeshift.fused_decode.model.families import rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.settings import require

_TENSORS = Tensors(
    attention_end="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_end="post_feedforward_layernorm",
)


def gemma2(config: Mapping[str, Any]) -> Architecture:
    stated = Config(config)
    layers = stated.count("num_hidden_layers")
    window = stated.window()
    every_other = [window if layer % 2 == 0 else 0 for layer in range(layers)]
    found, longest = _rope(stated, rope_config.stated(stated))
    return _made(
        stated,
        windows=stated.windows(layers, window, every_other),
        ropes=(found,) * layers,
        max_position=longest,
        score_cap=stated.cap("attn_logit_softcapping", 50.0),
        logit_cap=stated.cap("final_logit_softcapping", 30.0),
    )


def gemma3(config: Mapping[str, Any]) -> Architecture:
    """Layers with a window have a rope of their own."""
    stated = Config(config)
    layers, window = stated.count("num_hidden_layers"), stated.window()
    pattern = stated.count("sliding_window_pattern", 6)
    windows = stated.windows(layers, window, [window if (layer + 1) % pattern else 0 for layer in range(layers)])
    given = rope_config.stated(stated)
    nested = "full_attention" in given or "sliding_attention" in given
    older = given, {"rope_theta": stated.get("rope_local_base_freq", 1e4)}
    today = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    whole, near = today if nested else older
    for kind, values in (("full_attention", whole), ("sliding_attention", near)):
        require(isinstance(values, dict), kind, values, "an object or null")
    far, longest = _rope(stated, {"rope_theta": 1e6} | whole)
    local, _ = _rope(stated, {"rope_theta": 1e4} | near)
    return _made(
        stated,
        windows=windows,
        ropes=tuple(local if own else far for own in windows),
        max_position=longest,
        qk_norm="head",
        score_cap=stated.cap("attn_logit_softcapping"),
        logit_cap=stated.cap("final_logit_softcapping"),
    )


def _rope(stated: Config, values: Mapping[str, Any]) -> Any:
    size = stated.size()
    return rope_config.read(stated, values, size["head_dim"], size["max_position"])


def _made(stated: Config, **own: Any) -> Architecture:
    stated.refuse("use_bidirectional_attention", "false or absent: an encoder generates no text")
    size = stated.size()
    bias = stated.flag("attention_bias")
    plain = {
        "intermediate": stated.count("intermediate_size"),
        "norm_eps": stated.positive("rms_norm_eps", 1e-6),
        "scales": (stated.positive("query_pre_attn_scalar", 256) ** -0.5,) * size["layers"],
        "activation": stated.activation("hidden_activation", "gelu_pytorch_tanh"),
        "tied": stated.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
        "norm_offset": 1.0,
        "embedding_scale": size["hidden"] ** 0.5,
        "tensors": _TENSORS,
    }
    return Architecture(**(size | plain | own))
