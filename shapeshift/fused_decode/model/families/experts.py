"""Mixtures of experts: Mixtral, Qwen 3, OLMoE, gpt-oss. Attention as in Llama; each layer has experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import llama
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.parts import EXPERT_DOWN, EXPERT_GATE_UP, Experts, Tensors
from shapeshift.settings import require

_MOST, _MOST_TOGETHER = 1024, 1 << 17
"""Experts of a layer, and of all layers: of each one the loader reads tensors."""
_QWEN = Tensors(gate_up=EXPERT_GATE_UP, down=EXPERT_DOWN)
_MIXTRAL = Tensors(
    router="block_sparse_moe.gate",
    gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)
_GPT_OSS = Tensors(router="mlp.router", gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")


def mixtral(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rope_theta": 1e6, **values})
    window = (config.window(None),) * config.layers()
    experts = _experts(config, "num_local_experts", 8, 2)
    eps = config.positive("rms_norm_eps", 1e-5)
    return llama.with_fields(config, windows=window, experts=experts, tensors=_MIXTRAL, norm_eps=eps)


def qwen3_moe(values: Mapping[str, Any]) -> Architecture:
    allowed = "all layers have experts: a mixture with others is not served"
    step, plain = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers")
    require(step == 1, "decoder_sparse_step", step, f"1: {allowed}")
    require(not plain, "mlp_only_layers", plain, f"none: {allowed}")
    config = Config(values)
    experts = _experts(config, _experts_key(config), 128, 8)
    dense = llama.qwen3({**values, "intermediate_size": config.count("moe_intermediate_size", 768)})
    # Unlike the dense model it has no layers without a window.
    window = config.window() if config.flag("use_sliding_window") else 0
    experts = replace(experts, shares=config.flag("norm_topk_prob"))
    return replace(dense, windows=(window,) * dense.layers, experts=experts, tensors=_QWEN)


def olmoe(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    clip = config.get("clip_qkv")
    require(clip is None, "clip_qkv", clip, "null: queries, keys and values are not clipped")
    experts = replace(_experts(config, _experts_key(config), 64, 8), shares=config.flag("norm_topk_prob"))
    bias, eps = config.flag("attention_bias"), config.positive("rms_norm_eps", 1e-5)
    return llama.with_fields(
        config, qkv_bias=bias, output_bias=bias, qk_norm="row", norm_eps=eps, experts=experts, tensors=_QWEN
    )


def gpt_oss(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rope_theta": 150_000.0, **values})
    layers, window, bias = config.layers(), config.window(128), config.flag("attention_bias", True)
    every_other = [0 if layer % 2 else window for layer in range(layers)]
    experts = replace(
        _experts(config, "num_local_experts", 128, 4),
        biased=True,
        alpha=config.positive("swiglu_alpha", 1.702),
        limit=config.positive("swiglu_limit", 7.0),
        whole=True,
    )
    return llama.with_fields(
        config,
        windows=config.windows(layers, window, every_other),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        norm_eps=config.positive("rms_norm_eps", 1e-5),
        experts=experts,
        sinks=True,
        tensors=_GPT_OSS,
    )


def _experts_key(config: Config) -> str:
    """What a file calls the number of experts: transformers writes another name than it reads in older files."""
    return "num_local_experts" if "num_local_experts" in config.values else "num_experts"


def _experts(config: Config, key: str, count: int, chosen: int) -> Experts:
    """Those that the file states, with these numbers where it states none."""
    count = config.count(key, count)
    most = min(_MOST, _MOST_TOGETHER // config.layers())
    require(count <= most, key, count, f"at most {most} experts")
    chosen = config.count("num_experts_per_tok", chosen)
    require(chosen <= count, "num_experts_per_tok", chosen, f"at most {key} ({count})")
    scoring = config.get("scoring_func", "softmax")
    require(scoring == "softmax", "scoring_func", scoring, "softmax: no other router is served")
    groups = config.get("n_group", 1)
    require(groups in (1, None), "n_group", groups, "1: no router of groups is served")
    return Experts(count, chosen)
