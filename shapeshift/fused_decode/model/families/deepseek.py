"""Mixtures of experts with DeepSeek's router, around plain attention: GLM 4.5, Solar, dots, K-EXAONE, Hy 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import llama
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.families.experts import experts_of, with_dense
from shapeshift.fused_decode.model.parts import Experts, Tensors
from shapeshift.settings import require


def glm4_moe(values: Mapping[str, Any]) -> Architecture:
    config = Config({"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, **values})
    norm = "head" if config.flag("use_qk_norm") else ""
    return _deepseek(config, count=128, chosen=8, width=1408, qk_norm=norm)


def solar_open(values: Mapping[str, Any]) -> Architecture:
    # As transformers: whatever its files say of dense layers, it has none.
    dense = {"intermediate_size": 1, "first_k_dense_replace": 0}
    config = Config({"head_dim": 128, "rope_theta": 1e6, **values, **dense})
    return _deepseek(config, count=128, chosen=8, width=1280)


def dots1(values: Mapping[str, Any]) -> Architecture:
    config = Config({"norm_topk_prob": False, "rms_norm_eps": 1e-6, "n_shared_experts": 0, **values})
    layers, window = config.layers(), config.window()
    first = config.count("max_window_layers", 62, least=0)
    windows = config.windows(layers, window, [window if layer >= first else 0 for layer in range(layers)])
    bias = config.flag("attention_bias")
    return _deepseek(config, width=1408, qk_norm="head", windows=windows, output_bias=bias)


def exaone_moe(values: Mapping[str, Any]) -> Architecture:
    """Attention as in EXAONE 4, with norms before the branches."""
    config = Config(values, n_shared_experts="num_shared_experts")
    experts = _routed_by_groups(Config({"routed_scaling_factor": 2.5, **values}, **config.keys), 64, 8, 1024)
    tensors = Tensors(correction="mlp.e_score_correction_bias", others=("mtp.",))
    whole = replace(llama.exaone4(values), experts=experts, tensors=tensors)
    return with_dense(whole, _dense_of_types(config))


def hy_v3(values: Mapping[str, Any]) -> Architecture:
    config = Config(
        {"rope_theta": 11_158_840.0, "head_dim": 128, "router_scaling_factor": 2.826, **values, "norm_topk_prob": True},
        n_shared_experts="num_shared_experts",
        routed_scaling_factor="router_scaling_factor",
    )
    config.refuse("mlp_bias", "false or absent: experts have no biases")
    whole = llama.with_fields(
        config,
        qk_norm="head",
        norm_eps=config.positive("rms_norm_eps", 1e-5),
        experts=_routed_by_groups(config, 192, 8, 1536),
        tensors=Tensors(
            router="mlp.router.gate",
            correction="mlp.expert_bias",
            shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
            shared_down="mlp.shared_mlp.down_proj",
            others=(f"model.layers.{config.layers()}.",),
        ),
    )
    return with_dense(whole, _dense_of_types(config))


def _deepseek(
    config: Config, count: int | None = None, chosen: int | None = None, width: int = 0, **fields: Any
) -> Architecture:
    """Layers as DeepSeek's, around plain attention: the first ones have no experts."""
    layers = config.layers()
    experts = _routed_by_groups(config, count, chosen, width)
    fields.setdefault("output_bias", False)
    whole = llama.with_fields(
        config,
        partial=True,
        norm_eps=config.positive("rms_norm_eps", 1e-5),
        experts=experts,
        # Behind the last layer: the prediction of further tokens, which nothing here computes.
        tensors=Tensors(others=(f"model.layers.{layers}.",)),
        **fields,
    )
    first = config.count("first_k_dense_replace", 0, least=0)
    return with_dense(whole, [layer < first for layer in range(layers)])


def _routed_by_groups(config: Config, count: int | None, chosen: int | None, width: int) -> Experts:
    """Experts with DeepSeek's router: sigmoids, corrected for the choice alone, of which groups are chosen first."""
    width = config.count("moe_intermediate_size", width)
    experts = experts_of(config, width, count=count, chosen=chosen, scoring="sigmoid")
    groups = config.count("n_group", 1)
    allowed = f"a divisor of {experts.key} ({experts.count}), with 2 or more experts in a group"
    require(experts.count % groups == 0 and experts.count // groups > 1, "n_group", groups, allowed)
    most = config.count("topk_group", 1)
    allowed = f"at most n_group ({groups}), with room for {experts.chosen} experts"
    require(most <= groups and experts.chosen <= most * experts.count // groups, "topk_group", most, allowed)
    return replace(
        experts,
        shares=config.flag("norm_topk_prob", True),
        scale=config.positive("routed_scaling_factor", 1.0),
        groups=groups,
        chosen_groups=most,
        correction=(experts.count,),
        shared=width * config.count("n_shared_experts", 1, least=0),
    )


def _dense_of_types(config: Config) -> list[bool]:
    """Which layers have no experts, by `mlp_layer_types`."""
    layers, first = config.layers(), config.count("first_k_dense_replace", 1, least=0)
    kinds = config.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in range(layers)]
    fits = isinstance(kinds, list) and len(kinds) == layers and all(kind in ("dense", "sparse") for kind in kinds)
    require(fits, "mlp_layer_types", kinds, f"{layers} of dense, sparse")
    return [kind == "dense" for kind in kinds]
