"""Gemma 4: layers of two forms of attention, the last of which share keys and values, and inputs of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import gemma, rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.families.experts import experts_of
from shapeshift.fused_decode.model.parts import Experts, Tensors
from shapeshift.settings import require

_NAMES = replace(
    gemma.TENSORS,
    router="router.proj",
    expert_gate_up=("experts.gate_up_proj",),
    expert_down="experts.down_proj",
)
_QUERY, _KEY, _VALUE = Tensors.qkv


def gemma4_text(values: Mapping[str, Any]) -> Architecture:
    config = Config({"head_dim": 256, "hidden_size_per_layer_input": 256, **values})
    layers, window = config.layers(), config.window(512)
    # As transformers: the last layer has no window.
    windows = (*config.windows_in_turns(window, 6)[:-1], 0)
    whole, near = rope_config.by_window(
        rope_config.values_of(config)
        or {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    )
    attention = _attention(config, windows)
    sources, longest = _sources(config, windows), config.count("max_position_embeddings")
    ropes = [
        rope_config.read(config, near if width else whole, attention[layer]["head_dim"], longest)
        for layer, width in enumerate(windows)
    ]
    same = config.flag("attention_k_eq_v")
    double, intermediate = config.flag("use_double_wide_mlp"), config.count("intermediate_size")
    varied, others = [], []
    for layer, source in enumerate(sources):
        qkv = (_QUERY, _KEY, _KEY if same and not windows[layer] else _VALUE)
        fields = {**attention[layer], "kv_layer": source, "tensors": replace(_NAMES, qkv=qkv)}
        if source >= 0:
            fields["tensors"] = replace(_NAMES, qkv=(_QUERY,))
            fields["intermediate"] = intermediate * (2 if double else 1)
            # Files may hold those that no layer uses.
            others += [f"model.layers.{layer}.self_attn.{part}" for part in ("k_proj", "v_proj", "k_norm", "v_norm")]
        varied.append(fields)
    return gemma.with_fields(
        config,
        windows=windows,
        ropes=tuple(rope for rope, _ in ropes),
        max_position=max(length for _, length in ropes),
        scales=(1.0,) * layers,
        norm_offset=0.0,
        qk_norm="head",
        value_norm=True,
        logit_cap=config.cap("final_logit_softcapping"),
        layer_scale=True,
        layer_inputs=_layer_inputs(config),
        experts=_experts(config) if config.flag("enable_moe_block") else None,
        beside=config.flag("enable_moe_block"),
        tensors=replace(_NAMES, others=tuple(others)),
        varied=tuple(varied),
    )


def _attention(config: Config, windows: tuple[int, ...]) -> list[dict[str, int]]:
    """The sizes of the heads of each layer, and how many have keys and values. Files state them for each layer, or for
    those without a window."""
    heads = config.count("num_attention_heads")
    plain = {"head_dim": config.count("head_dim"), "kv_heads": config.count("num_key_value_heads", heads)}
    by_layer = config.get("per_layer_config")
    names = "per_layer_config.head_dim", "per_layer_config.num_key_value_heads"
    if by_layer is None:
        names = "global_head_dim", "num_global_key_value_heads"
        shared = config.get("num_global_key_value_heads") if config.flag("attention_k_eq_v") else None
        far = {"head_dim": config.count("global_head_dim", 512)}
        far |= {} if shared is None else {"num_key_value_heads": config.count("num_global_key_value_heads")}
        by_layer = {str(layer): far for layer, width in enumerate(windows) if not width}
    require(isinstance(by_layer, dict), "per_layer_config", by_layer, "an object")
    result = [plain] * len(windows)
    for key, fields in by_layer.items():
        fits = isinstance(fields, dict) and fields.keys() <= {"head_dim", "num_key_value_heads"}
        number = str(key).isdigit() and int(key) < len(windows)
        allowed = f"head_dim and num_key_value_heads of the layers 0 to {len(windows) - 1}"
        require(fits and number, "per_layer_config", by_layer, allowed)
        layer = Config(fields)
        head_dim = layer.count("head_dim", plain["head_dim"])
        kv_heads = layer.count("num_key_value_heads", plain["kv_heads"])
        require(head_dim % 2 == 0, names[0], head_dim, "even")
        require(heads % kv_heads == 0, names[1], kv_heads, f"a divisor of num_attention_heads ({heads})")
        result[int(key)] = {"head_dim": head_dim, "kv_heads": kv_heads}
    return result


def _sources(config: Config, windows: tuple[int, ...]) -> list[int]:
    """For each layer the one whose keys and values it uses; -1: it has its own."""
    layers, shared = len(windows), config.count("num_kv_shared_layers", 0, least=0)
    first = layers - shared
    last = {bool(width): layer for layer, width in enumerate(windows[: max(first, 0)])}
    allowed = f"fewer than the {layers} layers, of which each kind has one with keys and values of its own"
    fits = all(bool(width) in last for width in windows)
    require(fits, "num_kv_shared_layers", shared, allowed)
    return [-1 if layer < first else last[bool(width)] for layer, width in enumerate(windows)]


def _layer_inputs(config: Config) -> int:
    """The width of the inputs of each layer; 0: there are none."""
    width = config.count("hidden_size_per_layer_input", least=0)
    rows, vocab_size = config.count("vocab_size_per_layer_input", 262_144), config.count("vocab_size")
    require(not width or rows == vocab_size, "vocab_size_per_layer_input", rows, f"vocab_size ({vocab_size})")
    return width


def _experts(config: Config) -> Experts:
    keys = {"num_experts_per_tok": "top_k_experts"}
    one = experts_of(Config(config.values, **keys), config.count("moe_intermediate_size"), None, None)
    return replace(one, gelu=True, whole=True, scaled=True)
