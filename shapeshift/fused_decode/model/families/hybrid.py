"""Qwen 3.5 and Qwen3-Next: most layers have a gated delta net in place of attention; the others gate their heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import llama, rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.families.experts import QWEN2, STACKED, dense_of_qwen, experts_of
from shapeshift.fused_decode.model.parts import DeltaNet, Experts, Tensors
from shapeshift.settings import require

_MOST = 1 << 16
"""Heads of a delta net, elements of each, and tokens of its convolution."""
_KINDS = ("linear_attention", "full_attention")
# The prediction of further tokens, which nothing here computes.
_TENSORS = replace(QWEN2, others=("mtp.",))
_WHOLE = replace(_TENSORS, expert_gate_up=STACKED.expert_gate_up, expert_down=STACKED.expert_down)


def qwen3_5_text(values: Mapping[str, Any]) -> Architecture:
    return _hybrid(Config({"head_dim": 256, **values}), _TENSORS)


def qwen3_5_moe_text(values: Mapping[str, Any]) -> Architecture:
    config = Config({"head_dim": 256, "intermediate_size": 1, **values})
    return _hybrid(config, _WHOLE, replace(_experts(config, 256, 8), whole=True))


def qwen3_next(values: Mapping[str, Any]) -> Architecture:
    """Some layers may have one MLP; its delta nets have one tensor for all that they take."""
    config = Config({"head_dim": 256, **values})
    experts = replace(_experts(config, 512, 10), shares=config.flag("norm_topk_prob", True))
    whole = _hybrid(config, _TENSORS, experts, stacked=True)
    dense = dense_of_qwen(config)
    if all(dense):
        return replace(whole, experts=None)
    fields = zip(whole.varied, dense, strict=True)
    return replace(whole, varied=tuple({**one, "experts": None} if plain else one for one, plain in fields))


def _hybrid(config: Config, tensors: Tensors, experts: Experts | None = None, stacked: bool = False) -> Architecture:
    rope = {"partial_rotary_factor": 0.25} | rope_config.values_of(config)
    net = {
        "delta": _delta_net(config, stacked),
        "gated_heads": False,
        "qk_norm": "",
        "qkv_bias": False,
        "output_bias": False,
    }
    return llama.with_fields(
        config,
        rope,
        partial=True,
        qk_norm="head",
        norm_offset=1.0,
        gated_heads=True,
        experts=experts,
        tensors=tensors,
        varied=tuple(net if kind == _KINDS[0] else {} for kind in _kinds(config)),
    )


def _experts(config: Config, count: int, chosen: int) -> Experts:
    return replace(
        experts_of(config, config.count("moe_intermediate_size", 512), count=count, chosen=chosen),
        shared=config.count("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def _kinds(config: Config) -> list[str]:
    layers, turn = config.layers(), config.count("full_attention_interval", 4)
    kinds = config.get("layer_types") or [_KINDS[(layer + 1) % turn == 0] for layer in range(layers)]
    fits = isinstance(kinds, list) and len(kinds) == layers and all(kind in _KINDS for kind in kinds)
    require(fits, "layer_types", kinds, f"{layers} of {', '.join(_KINDS)}")
    require(_KINDS[1] in kinds, "layer_types", kinds, f"at least one {_KINDS[1]}")
    return list(kinds)


def _delta_net(config: Config, stacked: bool) -> DeltaNet:
    sizes = {
        key: config.count(f"linear_{key}", default)
        for key, default in (
            ("num_key_heads", 16),
            ("num_value_heads", 32),
            ("key_head_dim", 128),
            ("value_head_dim", 128),
            ("conv_kernel_dim", 4),
        )
    }
    for key, size in sizes.items():
        require(size <= _MOST, f"linear_{key}", size, f"at most {_MOST} (config.json)")
    key_heads, heads, key_dim, value_dim, kernel = sizes.values()
    allowed = f"a multiple of linear_num_key_heads ({key_heads})"
    require(heads % key_heads == 0, "linear_num_value_heads", heads, allowed)
    return DeltaNet(key_heads, heads, key_dim, value_dim, kernel, stacked)
