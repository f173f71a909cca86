"""Llama and what differs from it by a few values: Mistral, Qwen, Phi 3 and 4, OLMo, Granite, EXAONE, GLM and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.parts import Tensors
from shapeshift.settings import require

# Norms after the branches alone.
AFTER = Tensors(
    attention_norm="",
    attention_end="post_attention_layernorm",
    mlp_norm="",
    mlp_end="post_feedforward_layernorm",
)


def llama(values: Mapping[str, Any]) -> Architecture:
    return with_fields(Config(values))


def mistral(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    config.refuse("layer_types", "not supported for mistral")
    return with_fields(config, windows=(config.window(),) * config.layers())


def ministral(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    layers, window = config.layers(), config.window()
    return with_fields(config, windows=config.windows(layers, window, [window] * layers))


def ministral3(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    rope = rope_config.values_of(config)
    beta = rope.get("llama_4_scaling_beta") or 0.0
    return with_fields(
        config,
        windows=(config.window(None),) * config.layers(),
        query_growth=rope_config.positive(rope, "llama_4_scaling_beta") if beta else 0.0,
        query_span=Config(rope).count("original_max_position_embeddings") if beta else 0,
        norm_eps=config.positive("rms_norm_eps", 1e-5),
    )


def smollm3(values: Mapping[str, Any]) -> Architecture:
    """Some layers have no positions; those alone may have a window."""
    config = Config(values)
    layers, turns = config.layers(), with_positions(config)
    window = config.window(None) if config.flag("use_sliding_window") else 0
    windows = config.windows(layers, window, [0 if turn else window for turn in turns])
    whole = with_fields(
        config,
        {"rope_theta": 2e6} | rope_config.values_of(config),
        windows=windows,
        tied=config.flag("tie_word_embeddings", True),
    )
    ropes = tuple(rope if turn else None for rope, turn in zip(whole.ropes, turns, strict=True))
    return replace(whole, ropes=ropes)


def with_positions(config: Config) -> list[int]:
    """For each layer whether it has rotary positions, 0 or 1."""
    layers, interval = config.layers(), config.count("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    fits = isinstance(turns, list) and len(turns) == layers and all(turn in (0, 1) for turn in turns)
    require(fits, "no_rope_layers", turns, f"{layers} of 0 and 1: whether a layer has rotary positions")
    return list(turns)


def qwen2(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    return with_fields(config, windows=_chosen_windows(config), qkv_bias=True, output_bias=False)


def qwen3(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    return with_fields(config, windows=_chosen_windows(config), qk_norm="head")


def phi3(values: Mapping[str, Any]) -> Architecture:
    """Phi 3 and 4. Their first checkpoints call longrope su or yarn."""
    config = Config(values)
    config.refuse("attention_bias", "false or absent")
    rope = rope_config.values_of(config)
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        rope |= {"rope_type": "longrope"}
    window = (config.window(None),) * config.layers()
    tensors = Tensors(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    eps = config.positive("rms_norm_eps", 1e-5)
    return with_fields(config, rope, partial=True, windows=window, tensors=tensors, norm_eps=eps)


def seed_oss(values: Mapping[str, Any]) -> Architecture:
    config = Config({"head_dim": 128, "attention_bias": True, **values})
    return with_fields(config, output_bias=config.flag("attention_out_bias"))


def arcee(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    return with_fields(
        config,
        gated=False,
        activation=config.activation("hidden_act", "relu2"),
        norm_eps=config.positive("rms_norm_eps", 1e-5),
        tensors=Tensors(gate_up=("mlp.up_proj",)),
    )


def helium(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rope_theta": 1e5, "head_dim": 128, "rms_norm_eps": 1e-8, **values})
    return with_fields(config, output_bias=False, interleaved=True)


def ernie4_5(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rope_theta": 5e5, "head_dim": 128, "rms_norm_eps": 1e-5, **values})
    bias, tied = config.flag("use_bias"), config.flag("tie_word_embeddings", True)
    return with_fields(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias, tied=tied, interleaved=True)


def glm(values: Mapping[str, Any]) -> Architecture:
    return _glm(values)


def glm4(values: Mapping[str, Any]) -> Architecture:
    return _glm(values, attention_end="post_self_attn_layernorm", mlp_end="post_mlp_layernorm")


def _glm(values: Mapping[str, Any], attention_end: str = "", mlp_end: str = "") -> Architecture:
    config = Config({"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, **values})
    rope = {"partial_rotary_factor": 0.5} | rope_config.values_of(config)
    bias = config.flag("attention_bias", True)
    tensors = Tensors(gate_up=("mlp.gate_up_proj",), attention_end=attention_end, mlp_end=mlp_end)
    fields = {"qkv_bias": bias, "output_bias": False, "interleaved": True}
    return with_fields(config, rope, partial=True, tensors=tensors, **fields)


def cwm(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rms_norm_eps": 1e-5, **values})
    layers, window = config.layers(), config.window(8192)
    windows = config.windows(layers, window, [window if layer % 4 else 0 for layer in range(layers)])
    return with_fields(config, windows=windows)


def exaone4(values: Mapping[str, Any]) -> Architecture:
    """Where some layers have a window, the others have no positions."""
    config = Config({"rms_norm_eps": 1e-5, **values})
    window = config.window()
    turn = config.count("sliding_window_pattern", 4) if window and not config.get("layer_types") else 1
    windows = config.windows_in_turns(window, turn)
    whole = with_fields(config, windows=windows, qk_norm="head", tensors=AFTER)
    return replace(
        whole,
        ropes=tuple(rope if width or not window else None for rope, width in zip(whole.ropes, windows, strict=True)),
    )


def hyperclovax(values: Mapping[str, Any]) -> Architecture:
    """Granite, whose logits are multiplied where those are divided, with norms after the branches too."""
    config = Config(values)
    scale = config.positive("logits_scaling", 1.0)
    factor = values.get("attention_multiplier")
    factor = config.size()["head_dim"] ** -0.5 if factor is None else factor
    whole = granite({**values, "logits_scaling": 1.0, "attention_multiplier": factor})
    after = Tensors(attention_end="post_norm1", mlp_end="post_norm2")
    return replace(whole, logit_scale=scale, tensors=after if config.flag("use_post_norm", True) else Tensors())


def internlm3(values: Mapping[str, Any]) -> Architecture:
    config = Config({"head_dim": 128, "rms_norm_eps": 1e-5, **values})
    bias = config.flag("qkv_bias", config.flag("attention_bias"))
    mlp_bias = config.flag("bias", config.flag("mlp_bias"))
    require(bias == mlp_bias, "bias", mlp_bias, f"qkv_bias ({bias})")
    return with_fields(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def hunyuan_v1_dense(values: Mapping[str, Any]) -> Architecture:
    """Norms of queries and keys come after the rotation. A rope with an `alpha` has another base, for all texts."""
    config = Config({"rms_norm_eps": 1e-5, **values})
    rope = rope_config.values_of(config)
    if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
        head_dim = config.size()["head_dim"]
        require(head_dim > 2, "head_dim", head_dim, "above 2")
        stretch = rope_config.positive(rope, "alpha") ** (head_dim / (head_dim - 2))
        rope = {"rope_theta": rope_config.positive(rope, "rope_theta", 1e4) * stretch}
    return with_fields(
        config,
        rope,
        qk_norm="head",
        norm_last=True,
        tensors=Tensors(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
    )


def olmo2(values: Mapping[str, Any]) -> Architecture:
    return _olmo(Config(values))


def olmo3(values: Mapping[str, Any]) -> Architecture:
    """Layers with a window have a rope without scaling."""
    config = Config(values)
    windows = config.windows_in_turns(config.window(), 4)
    whole, near = rope_config.by_window(rope_config.values_of(config), "rope_theta")
    far = _olmo(config, {"rope_theta": 5e5} | whole)
    local = _olmo(config, {"rope_theta": 5e5} | near).ropes[0]
    return replace(far, windows=windows, ropes=tuple(local if width else far.ropes[0] for width in windows))


def _olmo(config: Config, rope_values: dict[str, Any] | None = None) -> Architecture:
    eps = config.positive("rms_norm_eps", 1e-5)
    return with_fields(config, rope_values, qk_norm="row", tensors=AFTER, norm_eps=eps)


def granite(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    return with_fields(
        config,
        scales=(config.positive("attention_multiplier", 1.0),) * config.layers(),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        branch_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / config.positive("logits_scaling", 1.0),
    )


def with_fields(
    config: Config, rope_values: dict[str, Any] | None = None, partial: bool = False, **fields: Any
) -> Architecture:
    """The architecture with these fields, and Llama's otherwise; rope_values: what the file states of it.

    partial: whether the family in transformers can rotate a part of a head.
    """
    size = config.size()
    layers, head_dim = size["layers"], size["head_dim"]
    bias = config.flag("attention_bias")
    if rope_values is None:
        rope_values = rope_config.values_of(config)
    rope, longest = rope_config.read(config, rope_values, head_dim, size["max_position"], partial)
    plain = {
        "intermediate": config.count("intermediate_size"),
        "norm_eps": fields.get("norm_eps") or config.positive("rms_norm_eps", 1e-6),
        "max_position": longest,
        "windows": (0,) * layers,
        "ropes": (rope,) * layers,
        "scales": (head_dim**-0.5,) * layers,
        "activation": fields.get("activation") or config.activation("hidden_act", "silu", "silu"),
        "tied": config.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": config.flag("mlp_bias"),
    }
    return Architecture(**(size | plain | fields))


def _chosen_windows(config: Config) -> tuple[int, ...]:
    """Qwen's: only with use_sliding_window, and only for the layers from max_window_layers on."""
    layers = config.layers()
    window = config.window() if config.flag("use_sliding_window") else 0
    if not window:
        return (0,) * layers
    first = config.get("max_window_layers", 28)
    require(isinstance(first, int), "max_window_layers", first, "a whole number")
    return config.windows(layers, window, [window if layer >= first else 0 for layer in range(layers)])
