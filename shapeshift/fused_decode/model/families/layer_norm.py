"""Phi 1 and 2, StarCoder 2, StableLM, Nemotron and Cohere's: layer norms, and rotary positions as in Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.families.llama import with_fields
from shapeshift.fused_decode.model.parts import Tensors
from shapeshift.settings import require

_SHARED = "input_layernorm"
"""The norm of both branches, where they are side by side."""


def phi(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    config.refuse("qk_layernorm", "false or absent: queries and keys with layer norms are not served")
    tensors = Tensors(
        output="self_attn.dense",
        mlp_norm=_SHARED,
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
        final_norm="model.final_layernorm",
    )
    rope = {"partial_rotary_factor": 0.5} | rope_config.values_of(config)
    return _architecture(
        config,
        rope,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        parallel=True,
        gated=False,
        activation=config.activation("hidden_act", "gelu_new"),
        tensors=tensors,
    )


def starcoder2(values: Mapping[str, Any]) -> Architecture:
    config = Config(values, layer_norm_eps="norm_epsilon")
    bias = config.flag("use_bias", True)
    return _architecture(
        config,
        windows=(config.window(None),) * config.layers(),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        gated=False,
        activation=config.activation("hidden_act", "gelu_pytorch_tanh"),
        tied=config.flag("tie_word_embeddings", True),
        tensors=Tensors(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    )


def stablelm(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    config.refuse("qk_layernorm", "false or absent: queries and keys with layer norms are not served")
    parallel = config.flag("use_parallel_residual")
    rope = {"partial_rotary_factor": 0.25} | rope_config.values_of(config)
    tensors = Tensors(mlp_norm=_SHARED) if parallel else Tensors()
    bias = config.flag("use_qkv_bias")
    return _architecture(config, rope, qkv_bias=bias, output_bias=False, parallel=parallel, tensors=tensors)


def nemotron(values: Mapping[str, Any]) -> Architecture:
    config = Config(values, layer_norm_eps="norm_eps")
    return _architecture(
        config,
        {"partial_rotary_factor": 0.5} | rope_config.values_of(config),
        norm_offset=1.0,
        gated=False,
        activation=config.activation("hidden_act", "relu2"),
        tensors=Tensors(gate_up=("mlp.up_proj",)),
    )


def cohere(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rope_theta": 5e5, **values})
    config.refuse("use_qk_norm", "false or absent: queries and keys with layer norms are not served")
    return _cohere(config)


def cohere2(values: Mapping[str, Any]) -> Architecture:
    """Layers without a window have no positions."""
    config = Config(values)
    window = config.window()
    require(window > 0, "sliding_window", config.get("sliding_window"), "a whole number of at least 1")
    windows = config.windows_in_turns(window, config.count("sliding_window_pattern", 4))
    whole = _cohere(config)
    ropes = tuple(rope if width else None for rope, width in zip(whole.ropes, windows, strict=True))
    return replace(whole, windows=windows, ropes=ropes)


def _cohere(config: Config) -> Architecture:
    return _architecture(
        config,
        partial=False,
        norm="centred",
        parallel=True,
        interleaved=True,
        logit_scale=config.positive("logit_scale", 0.0625),
        tied=config.flag("tie_word_embeddings", True),
        tensors=Tensors(mlp_norm=_SHARED),
    )


def _architecture(
    config: Config, rope_values: dict[str, Any] | None = None, partial: bool = True, **fields: Any
) -> Architecture:
    eps = config.positive("layer_norm_eps", 1e-5)
    return with_fields(config, rope_values, partial=partial, **{"norm": "layer", "norm_eps": eps, **fields})
