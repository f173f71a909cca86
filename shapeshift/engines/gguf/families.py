"""What a GGUF file says of a decoder, in the words of transformers: its config.json, and the names of its tensors.

Facts of each architecture are those of llama.cpp, which writes and reads such files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shapeshift.engines.gguf.files import Gguf, Stored
from shapeshift.engines.gguf.tensors import GROUP, LEVELS, Entry
from shapeshift.engines.gguf.tokenizer import ENDS, TokenType, token_types
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

_ARCHITECTURE = "general.architecture"
_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Hold nothing but what config.json says.
_BESIDE = (_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors of all experts of a layer, [experts, outputs, inputs], and the linear of each."""
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_GPT_OSS = {
    "ffn_gate_inp": "mlp.router",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LINEARS = ("self_attn.", "mlp.")
# Keys of config.json, and what llama.cpp calls them behind the name of the architecture.
_COUNTS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")

Values = Callable[[str, Any], Any]
"""A value of the file by its key behind the name of the architecture; the second argument where it has none."""


def _nothing(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """How llama.cpp writes a family of transformers.

    model_type, model  as config.json has them: the second is the class of transformers
    names      of tensors of a layer, beside _LAYERS
    more       values of config.json that other families lack
    paired     whether the elements of a head that rotate together lie side by side
    norm_added  what is added to the weights of norms
    partial    whether a part of each head rotates
    experts    whether it is a mixture of experts
    """

    model_type: str
    model: str
    names: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Values, Mapping[str, Any]], dict[str, Any]] = _nothing
    paired: bool = False
    norm_added: float = 0.0
    partial: bool = False
    experts: bool = False


def _gemma(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    # llama.cpp knows by the layers that a model is the one of 27B, whose scores have another scale.
    whole = config["hidden_size"] // config["num_attention_heads"]
    large = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]] == config["num_hidden_layers"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": whole if large else config["head_dim"],
        "sliding_window": values("attention.sliding_window", 4096),
        "attn_logit_softcapping": values("attn_logit_softcapping", None),
        "final_logit_softcapping": values("final_logit_softcapping", None),
    }


def _gemma3(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    every = 6
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(_layers(config))]
    # The layers with a window have a base of their own, and no scaling.
    near = {"rope_type": "default", "rope_theta": values("rope.freq_base_swa", 1e4)}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": near}
    return _gemma(values, config) | {"layer_types": kinds, "rope_parameters": ropes}


def _granite(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": values("attention.scale", 1.0),
        "embedding_multiplier": values("embedding_scale", 1.0),
        "residual_multiplier": values("residual_scale", 1.0),
        "logits_scaling": values("logit_scale", 1.0),
    }


def _phi3(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    original = values("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = values("attention.sliding_window", 0)
    return {"original_max_position_embeddings": original, "sliding_window": window or None, "pad_token_id": None}


def _mixture(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    width = values("expert_feed_forward_length", config["intermediate_size"])
    return {
        "num_experts": values("expert_count", None),
        "num_experts_per_tok": values("expert_used_count", None),
        "moe_intermediate_size": width,
        # As llama.cpp has it for each.
        "norm_topk_prob": config["model_type"] == "qwen3_moe",
    }


def _gpt_oss(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": values("expert_count", None),
        "num_experts_per_tok": values("expert_used_count", None),
        "intermediate_size": values("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": values("attention.sliding_window", 128),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


def _layers(config: Mapping[str, Any]) -> int:
    return int(config["num_hidden_layers"])


_GEMMA_NORMS = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", paired=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _ROUTER, _mixture, experts=True),
    "olmoe": Family("olmoe", "OlmoeForCausalLM", _ROUTER, _mixture, experts=True),
    "gpt-oss": Family("gpt_oss", "GptOssForCausalLM", _GPT_OSS, _gpt_oss, experts=True),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", paired=True),
    "phi3": Family("phi3", "Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}, _phi3, partial=True),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", _NORMS_AFTER),
    "granite": Family("granite", "GraniteForCausalLM", more=_granite, paired=True),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _GEMMA_NORMS, _gemma, norm_added=1.0),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", _GEMMA_NORMS, _gemma3, norm_added=1.0),
}
"""By the architecture that a GGUF file names."""


def family_of(model: Gguf) -> Family:
    """Raises InvalidInputError for an architecture that is not served."""
    name = model.metadata.get(_ARCHITECTURE)
    require(name in FAMILIES, _ARCHITECTURE, name, f"one of {', '.join(FAMILIES)} (GGUF)")
    return FAMILIES[str(name)]


def config_of(model: Gguf, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """The content of the config.json; entries: see `entries_of`. Raises InvalidInputError naming the key."""
    family, prefix = family_of(model), model.metadata[_ARCHITECTURE]

    def values(key: str, default: Any) -> Any:
        return model.metadata.get(f"{prefix}.{key}", default)

    config: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.model]}
    for key, name in _COUNTS.items():
        config[key] = values(name, None)
        require(type(config[key]) is int, f"{prefix}.{name}", config[key], "a whole number: all layers alike (GGUF)")
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = values("attention.head_count_kv", heads)
    config["head_dim"] = values("attention.key_length", config["hidden_size"] // max(1, heads))
    width = values("attention.value_length", config["head_dim"])
    require(width == config["head_dim"], f"{prefix}.attention.value_length", width, f"{config['head_dim']}, as keys")
    experts = values("expert_count", 0)
    require(family.experts or not experts, f"{prefix}.expert_count", experts, "0: no experts")
    config["rms_norm_eps"] = values("attention.layer_norm_rms_epsilon", 1e-6)
    config["vocab_size"] = entries["model.embed_tokens.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in entries
    biased = "model.layers.0.self_attn.q_proj.bias" in entries
    config["attention_bias"] = biased and family.model_type != "qwen2"
    config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in entries
    config["rope_parameters"] = _rope(model, values, config, family)
    config |= family.more(values, config)
    bits = bits_of(entries)
    if bits:
        config["quantization_config"] = {"quant_method": "gguf", "bits": bits, "group_size": GROUP}
    ids = end_ids(model)
    return config | {"eos_token_id": ids[0] if len(ids) == 1 else ids, "dtype": "float32"}


def entries_of(model: Gguf) -> dict[str, Entry]:
    """The tensors by the names of transformers. Raises InvalidInputError for one that the family does not have."""
    family = family_of(model)
    heads = {
        part: model.metadata.get(f"{model.metadata[_ARCHITECTURE]}.attention.{key}", 0)
        for part, key in (("attn_q", "head_count"), ("attn_k", "head_count_kv"))
    }
    heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
    entries: dict[str, Entry] = {}
    for name, stored in model.tensors.items():
        if name in _BESIDE:
            continue
        layer = _LAYER.fullmatch(name)
        part = layer[2] if layer else name.rpartition(".")[0]
        names = {**_LAYERS, **family.names} if layer else _OUTSIDE
        end = name.rpartition(".")[2]
        if layer and family.experts and part in _EXPERTS and len(stored.shape) > 1:
            entries |= _of_experts(f"model.layers.{layer[1]}.mlp.experts", f"{_EXPERTS[part]}.{end}", stored)
            continue
        require(part in names, name, stored.shape, f"a tensor of {family.model_type} ({stored.file.name})")
        today = f"model.layers.{layer[1]}.{names[part]}.{end}" if layer else f"{names[part]}.{end}"
        # A parameter by itself.
        today = today.removesuffix(".weight") if part == "attn_sinks" else today
        entries[today] = Entry(
            stored.file.name,
            stored.kind,
            stored.offset,
            stored.shape,
            heads=heads.get(part, 0) if family.paired else 0,
            added=family.norm_added if part.endswith("norm") else 0.0,
        )
    if "model.embed_tokens.weight" not in entries:
        raise InvalidInputError("checkpoint", model.files[0].name, "must hold token_embd.weight: this file is no model")
    return entries


def _of_experts(module: str, tensor: str, stored: Stored) -> dict[str, Entry]:
    """The part of each expert in a tensor of all; tensor: its name within an expert."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    count, *shape = stored.shape
    per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType[stored.kind]]
    step = math.prod(shape) // per_block * size
    return {
        f"{module}.{number}.{tensor}": Entry(stored.file.name, stored.kind, stored.offset + number * step, tuple(shape))
        for number in range(count)
    }


def bits_of(entries: Mapping[str, Entry]) -> int:
    """The bits of the levels in which the linears of all layers lie; 0: some do not lie in any."""
    kinds = {entry.kind for name, entry in entries.items() if is_linear(name)}
    bits = {LEVELS.get(kind, 0) for kind in kinds}
    return bits.pop() if len(bits) == 1 else 0


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a linear of a layer."""
    place = name.removeprefix("model.layers.").partition(".")[2]
    return place.startswith(_LINEARS) and name.endswith("_proj.weight")


def end_ids(model: Gguf) -> list[int]:
    """The ids of the tokens that end an answer, sorted."""
    metadata = model.metadata
    ids = {int(metadata[key]) for name in _END_IDS if (key := f"tokenizer.ggml.{name}") in metadata}
    texts = metadata.get("tokenizer.ggml.tokens", [])
    types = enumerate(token_types(metadata, texts))
    return sorted(ids | {id for id, kind in types if kind == TokenType.CONTROL and texts[id] in ENDS})


def _rope(model: Gguf, values: Values, config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The `rope_parameters`."""
    rotated, head_dim = values("rope.dimension_count", config["head_dim"]), config["head_dim"]
    require(family.partial or rotated == head_dim, "rope.dimension_count", rotated, f"{head_dim}, the width of a head")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": values("rope.freq_base", 10_000.0)}
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    original = values("rope.scaling.original_context_length", config["max_position_embeddings"])
    if _FACTORS in model.tensors:
        # Llama 3: the divisors of all frequencies, whatever the length of the text.
        divisors = _divisors(model, _FACTORS)
        alike = {"short_factor": divisors, "long_factor": divisors, "factor": 1.0, "attention_factor": 1.0}
        return rope | {"rope_type": "longrope", "original_max_position_embeddings": original, **alike}
    if _LONG_FACTORS in model.tensors:
        both = {"short_factor": _divisors(model, _SHORT_FACTORS), "long_factor": _divisors(model, _LONG_FACTORS)}
        factor = values("rope.scaling.attn_factor", None)
        return rope | {"rope_type": "longrope", "attention_factor": factor, **both}
    kind = values("rope.scaling.type", "none")
    require(kind in ("none", "linear", "yarn"), "rope.scaling.type", kind, "none, linear or yarn")
    if kind == "none":
        return rope
    scaled = {"rope_type": kind, "factor": values("rope.scaling.factor", 1.0)}
    return rope | scaled | ({"original_max_position_embeddings": original} if kind == "yarn" else {})


def _divisors(model: Gguf, name: str) -> list[float]:
    from shapeshift.engines.gguf.tensors import numbers

    stored = model.tensors[name]
    entry = Entry(stored.file.name, stored.kind, stored.offset, stored.shape)
    return [float(value) for value in numbers(stored.file.parent, entry)]
