"""GPT-2, GPT-J and GPT-NeoX: layer norms, an MLP without a gate, branches one after the other or side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.families import rope_config
from shapeshift.fused_decode.model.families.config import Config
from shapeshift.fused_decode.model.parts import Rope, Tensors
from shapeshift.settings import require

_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
_GPT2 = Tensors(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    final_norm="transformer.ln_f",
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
    columns=True,
)
# Both branches share one norm.
_GPTJ = Tensors(
    embedding="transformer.wte",
    layers="transformer.h",
    attention_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    mlp_norm="ln_1",
    gate_up=("mlp.fc_in",),
    down="mlp.fc_out",
    final_norm="transformer.ln_f",
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)
_NEOX = Tensors(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    qkv=("attention.query_key_value",),
    output="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
    renamed=(("embed_out.weight", "lm_head.weight"),),
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    by_head=True,
)


def gpt2(values: Mapping[str, Any]) -> Architecture:
    config = Config(values, **_KEYS)
    config.refuse("add_cross_attention", "false or absent: the encoder of a pair is not served")
    size = config.size()
    first = size["head_dim"] ** -0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    return _architecture(
        config,
        ropes=(None,) * size["layers"],
        scales=tuple(first / (layer + 1 if by_layer else 1) for layer in range(size["layers"])),
        intermediate=config.count("intermediate_size", 4 * size["hidden"]),
        norm_eps=config.positive("layer_norm_epsilon", 1e-5),
        activation=config.activation("hidden_act", "gelu_new"),
        tied=config.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        tensors=_GPT2,
    )


def gptj(values: Mapping[str, Any]) -> Architecture:
    config = Config(values, **_KEYS)
    size = config.size()
    rotated = config.count("rotary_dim") if "rotary_dim" in values else 64
    allowed = f"an even number of at most the size of a head ({size['head_dim']})"
    require(rotated % 2 == 0 and rotated <= size["head_dim"], "rotary_dim", rotated, allowed)
    return _architecture(
        config,
        ropes=(Rope(rotated=rotated),) * size["layers"],
        intermediate=config.count("intermediate_size", 4 * size["hidden"]),
        norm_eps=config.positive("layer_norm_epsilon", 1e-5),
        activation=config.activation("hidden_act", "gelu_new"),
        tied=config.flag("tie_word_embeddings"),
        head_bias=True,
        parallel=True,
        interleaved=True,
        tensors=_GPTJ,
    )


def gpt_neox(values: Mapping[str, Any]) -> Architecture:
    config = Config(values)
    size = config.size()
    older = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct", 0.25)}
    rope_values = {key: value for key, value in older.items() if value is not None} | rope_config.values_of(config)
    rope, longest = rope_config.read(config, rope_values, size["head_dim"], size["max_position"], partial=True)
    bias = config.flag("attention_bias", True)
    return _architecture(
        config,
        ropes=(rope,) * size["layers"],
        max_position=longest,
        intermediate=config.count("intermediate_size"),
        norm_eps=config.positive("layer_norm_eps", 1e-5),
        activation=config.activation("hidden_act", "gelu"),
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=bias,
        output_bias=bias,
        parallel=config.flag("use_parallel_residual", True),
        tensors=_NEOX,
    )


def _architecture(config: Config, ropes: tuple[Rope | None, ...], **fields: Any) -> Architecture:
    size = config.size()
    plain = {
        "kv_heads": size["heads"],
        "windows": (0,) * size["layers"],
        "scales": (size["head_dim"] ** -0.5,) * size["layers"],
        "ropes": ropes,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": True,
        "norm": "layer",
        "gated": False,
    }
    return Architecture(**(size | plain | fields))
