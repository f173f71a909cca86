"""Mixtures of experts: their attention is that of a dense family, and most of their layers have experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import llama, rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.parts import Experts, Tensors
from shapeshift.settings import require

_MOST, _MOST_TOGETHER = 1024, 1 << 17
"""Experts of a layer, and of all layers: of each one the loader reads tensors."""
_MIXTRAL = Tensors(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)
QWEN2 = Tensors(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)
STACKED = Tensors(expert_gate_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj")
_GPT_OSS = replace(STACKED, router="mlp.router")
_LLAMA4 = Tensors(
    query_norm="",
    key_norm="",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate_up=("feed_forward.experts.gate_up_proj",),
    expert_down="feed_forward.experts.down_proj",
    shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)
# A tensor of all experts is the weight of a module.
_GRANITE = Tensors(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.weight",),
    expert_down="block_sparse_moe.output_linear.weight",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)


def mixtral(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rope_theta": 1e6, **values})
    window = (config.window(None),) * config.layers()
    experts = experts_of(config, config.count("intermediate_size"), count=8, chosen=2)
    eps = config.positive("rms_norm_eps", 1e-5)
    return llama.with_fields(config, windows=window, experts=experts, tensors=_MIXTRAL, norm_eps=eps)


def minimax_m2(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rope_theta": 5e6, "head_dim": 128, **values})
    rope = rope_config.values_of(config)
    if config.get("rotary_dim") is not None:
        rope = {"partial_rotary_factor": config.count("rotary_dim") / config.count("head_dim")} | rope
    experts = experts_of(config, config.count("intermediate_size"), count=256, chosen=8, scoring="sigmoid")
    experts = replace(experts, correction=(experts.count,))
    return llama.with_fields(config, rope, partial=True, qk_norm="row", experts=experts, tensors=_MIXTRAL)


def qwen2_moe(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    layers, window = config.layers(), config.window() if config.flag("use_sliding_window") else 0
    most = config.count("max_window_layers", 28)
    every_other = [window if layer % 2 == 0 and layer < most else 0 for layer in range(layers)]
    experts = replace(
        experts_of(config, config.count("moe_intermediate_size", 1408), count=60, chosen=4),
        shares=config.flag("norm_topk_prob"),
        shared=config.count("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    whole = llama.with_fields(
        config,
        windows=config.windows(layers, window, every_other),
        qkv_bias=config.flag("qkv_bias", True),
        output_bias=False,
        experts=experts,
        tensors=QWEN2,
    )
    return with_dense(whole, dense_of_qwen(config))


def qwen3_moe(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    experts = experts_of(config, config.count("moe_intermediate_size", 768), count=128, chosen=8)
    experts = replace(experts, shares=config.flag("norm_topk_prob"))
    dense = llama.qwen3(values)
    # Unlike the dense model it has no layers without a window.
    window = config.window() if config.flag("use_sliding_window") else 0
    return with_dense(replace(dense, windows=(window,) * dense.layers, experts=experts), dense_of_qwen(config))


def qwen3_vl_moe_text(values: Mapping[str, Any]) -> Architecture:
    """Its router always divides the weights of the chosen by their sum."""
    defaults = {"rope_theta": 5e5, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    whole = qwen3_moe({**defaults, **values, "norm_topk_prob": True, "use_sliding_window": False})
    assert whole.experts is not None
    return replace(whole, tensors=STACKED, experts=replace(whole.experts, whole=True, columns=True))


def olmoe(values: Mapping[str, Any]) -> Architecture:
    return _olmoe(Config({"rms_norm_eps": 1e-5, **values}), Tensors(), 64, 8)


def flex_olmo(values: Mapping[str, Any]) -> Architecture:
    return _olmoe(Config({"rope_theta": 5e5, **values}), llama.AFTER, 7, 5)


def _olmoe(config: Config, tensors: Tensors, count: int, chosen: int) -> Architecture:
    clip = config.get("clip_qkv")
    require(clip is None, "clip_qkv", clip, "null: queries, keys and values are not clipped")
    experts = experts_of(config, config.count("intermediate_size"), count=count, chosen=chosen)
    experts = replace(experts, shares=config.flag("norm_topk_prob"))
    return llama.with_fields(config, qk_norm="row", experts=experts, tensors=tensors)


def gpt_oss(values: Mapping[str, Any]) -> Architecture:
    config = Config({"rope_theta": 150_000.0, **values})
    layers, window, bias = config.layers(), config.window(128), config.flag("attention_bias", True)
    every_other = [0 if layer % 2 else window for layer in range(layers)]
    experts = replace(
        experts_of(config, config.count("intermediate_size"), count=128, chosen=4),
        biased=True,
        alpha=config.positive("swiglu_alpha", 1.702),
        limit=config.positive("swiglu_limit", 7.0),
        whole=True,
        columns=True,
        alternating=True,
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


def ernie4_5_moe(values: Mapping[str, Any]) -> Architecture:
    config = Config(values, num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    config.refuse("use_bias", "false or absent: experts have no biases")
    layers, width = config.layers(), config.count("moe_intermediate_size", 1536)
    experts = experts_of(config, width, count=64, chosen=6)
    shared = width * config.count("moe_num_shared_experts", 2, least=0)
    first, end = config.count("moe_layer_start_index", 1, least=0), config.get("moe_layer_end_index", -1)
    last = layers - 1 if end == -1 else config.count("moe_layer_end_index", least=0)
    step = config.count("moe_layer_interval", 1)
    # Layers of the prediction of further tokens, which nothing here computes.
    tensors = Tensors(correction="mlp.moe_statics.e_score_correction_bias", others=("model.mtp",))
    experts = replace(experts, correction=(1, experts.count), shared=shared)
    whole = replace(llama.ernie4_5(values), experts=experts, tensors=tensors)
    return with_dense(whole, [not first <= layer <= last or (layer + 1) % step != 0 for layer in range(layers)])


def hunyuan_v1_moe(values: Mapping[str, Any]) -> Architecture:
    """Its files state some values for each layer."""
    alike = {}
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        value = values.get(key)
        each = value if isinstance(value, list) and value else [value]
        require(all(one == each[0] for one in each), key, value, "the same for all layers")
        alike[key] = each[0]
    config = Config({**values, **alike}, num_experts_per_tok="moe_topk")
    config.refuse("use_cla", "false or absent: layers share no keys and values")
    width = config.count("intermediate_size")
    for key, only in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        require(alike[key] in (None, only), key, values.get(key), f"{only} for {values['model_type']}")
    experts = replace(experts_of(config, width, count=1, chosen=1), shared=width)
    tensors = Tensors(
        query_norm="self_attn.query_layernorm",
        key_norm="self_attn.key_layernorm",
        router="mlp.gate.wg",
        shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    )
    return replace(llama.hunyuan_v1_dense(values), experts=experts, tensors=tensors)


def granitemoe(values: Mapping[str, Any]) -> Architecture:
    config = Config({**values, "mlp_bias": False})
    experts = experts_of(config, config.count("intermediate_size"), count=8, chosen=2)
    shared = config.count("shared_intermediate_size", 0, least=0)
    return replace(llama.granite(config.values), experts=replace(experts, shared=shared, whole=True), tensors=_GRANITE)


def granitemoeshared(values: Mapping[str, Any]) -> Architecture:
    return granitemoe(values)


def granitemoehybrid(values: Mapping[str, Any]) -> Architecture:
    """Granite 4 without Mamba's layers. Without experts, the shared one is a plain MLP."""
    config = Config(values)
    layers = config.layers()
    kinds = config.get("layer_types", config.get("layers_block_type"))
    allowed = f"{layers} of full_attention or attention: layers of Mamba are not served"
    plain = isinstance(kinds, list) and all(kind in ("full_attention", "attention") for kind in kinds)
    require(plain and len(kinds) == layers, "layer_types", kinds, allowed)
    positions = config.get("position_embedding_type")
    require(positions in ("rope", "nope", None), "position_embedding_type", positions, "rope, nope or null")
    if config.count("num_local_experts", 8, least=0):
        whole = granitemoe({"shared_intermediate_size": 1024, **values})
    else:
        width = config.count("shared_intermediate_size", 1024)
        dense = llama.granite({**values, "mlp_bias": False, "intermediate_size": width})
        tensors = Tensors(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
        whole = replace(dense, tensors=tensors)
    return whole if positions == "rope" else replace(whole, ropes=(None,) * layers)


def llama4_text(values: Mapping[str, Any]) -> Architecture:
    """Layers with positions attend within chunks; their queries and keys are normalised without weights."""
    config = Config({"rope_theta": 5e5, "head_dim": 128, "rms_norm_eps": 1e-5, **values})
    layers, width, turns = config.layers(), config.count("intermediate_size"), llama.with_positions(config)
    chunk = 0 if config.get("attention_chunk_size", 8192) is None else config.count("attention_chunk_size", 8192)
    kinds = config.get("layer_types") or ["chunked_attention" if turn else "full_attention" for turn in turns]
    widths = {"chunked_attention": chunk, "full_attention": 0}
    fits = isinstance(kinds, list) and len(kinds) == layers and all(kind in tuple(widths) for kind in kinds)
    require(fits, "layer_types", kinds, f"{layers} of {', '.join(widths)}")
    experts = experts_of(config, width, count=16, chosen=1, scoring="sigmoid")
    step = config.count("interleave_moe_layer_step", 1)
    mixed = _numbers(config, "moe_layers", range(step - 1, layers, step))
    whole = llama.with_fields(
        Config({**config.values, "intermediate_size": config.count("intermediate_size_mlp", 16_384)}),
        windows=tuple(widths[kind] for kind in kinds),
        chunked=True,
        norm_last=True,
        interleaved=True,
        experts=replace(experts, shares=False, scales_rows=True, shared=width, whole=True, columns=True),
        tensors=_LLAMA4,
    )
    tuned = config.flag("attn_temperature_tuning", True)
    still: dict[str, Any] = {
        "query_growth": config.positive("attn_scale", 0.1) if tuned else 0.0,
        "query_span": config.count("floor_scale", 8192),
    }
    turning = {"qk_norm": "head" if config.flag("use_qk_norm", True) else ""}
    varied = tuple(
        (turning if turn else still) | ({} if layer in mixed else {"experts": None}) for layer, turn in enumerate(turns)
    )
    ropes = tuple(rope if turn else None for rope, turn in zip(whole.ropes, turns, strict=True))
    return replace(whole, ropes=ropes, varied=varied, query_ahead=1)


def dense_of_qwen(config: Config) -> list[bool]:
    """Which layers have no experts."""
    plain, step = _numbers(config, "mlp_only_layers", ()), config.count("decoder_sparse_step", 1)
    return [layer in plain or (layer + 1) % step != 0 for layer in range(config.layers())]


def _numbers(config: Config, key: str, default: Sequence[int]) -> Sequence[int]:
    """The layers that the file states by their numbers."""
    numbers, layers = config.get(key), config.layers()
    fits = numbers is None or (isinstance(numbers, list) and all(one in range(layers) for one in numbers))
    require(fits, key, numbers, f"numbers of layers, 0 to {layers - 1}")
    return default if numbers is None else list(numbers)


def with_dense(whole: Architecture, dense: Sequence[bool]) -> Architecture:
    """With an MLP in the place of the experts in the layers where `dense` is true."""
    if all(dense):
        return replace(whole, experts=None)
    return replace(whole, varied=tuple({"experts": None} if one else {} for one in dense)) if any(dense) else whole


def experts_of(config: Config, width: int, count: int | None, chosen: int | None, scoring: str = "softmax") -> Experts:
    """Those that the file states, with these numbers where it states none."""
    function, groups = config.get("scoring_func", scoring), config.get("n_group", 1)
    require(function == scoring, "scoring_func", function, f"{scoring}: no other router is served")
    require(groups in (1, None) or scoring == "sigmoid", "n_group", groups, "1: no router of groups is served")
    # transformers writes another name than it reads in older files.
    key = next((key for key in ("num_local_experts", "n_routed_experts") if key in config.values), "num_experts")
    count, name = config.count(key, count), config.name(key)
    most = min(_MOST, _MOST_TOGETHER // config.layers())
    require(count <= most, name, count, f"at most {most} experts")
    chosen = config.count("num_experts_per_tok", chosen)
    require(chosen <= count, config.name("num_experts_per_tok"), chosen, f"at most {name} ({count})")
    return Experts(count, chosen, width, key=name, sigmoid=scoring == "sigmoid")
