"""The architecture of a causal language model: what a checkpoint's config.json says, as data.

A layer is two branches over one residual state, attention and MLP. Each has a norm before it, after it, or both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shapeshift.engines.checkpoint import tensor_shapes
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.formats.packing import GGUF, Packing, packing_of
from shapeshift.fused_decode.model.parts import DeltaNet, Experts, Rope, Tensors
from shapeshift.settings import Choices, require

_FAMILIES = "shapeshift.fused_decode.model.families"
_PLAIN_BYTES, _SMALL = 2, 2**30


@dataclass(frozen=True)
class Architecture:
    """A decoder. Its defaults are those of Llama: RMS norm before each branch, rotary positions, gated SiLU.

    head_dim is even, and heads a multiple of kv_heads.

    windows      for each layer the number of latest tokens that a token attends to, itself included; 0: all
    chunked      windows are chunks: a token attends to those of its own chunk
    ropes        for each layer its rotary positions; None: it has none
    scales       for each layer the factor of its scores
    score_cap, logit_cap  c: a value x becomes c tanh(x / c); 0: it stays
    norm         rms; layer, with mean and bias; or centred, with mean alone; norm_offset is added to the weights of all
    qk_norm      head: each query and key of a head; row: those of all heads together; empty: none
    norm_last    those of heads come after the rotation
    value_norm   each value of a head is normalised, without weights
    kv_layer     the layer whose keys and values this one takes; -1: it has its own
    parallel     whether both branches take the state before the layer
    gated        whether the MLP multiplies the activation of one half by the other half
    query_growth, query_span, query_ahead  g, s, a: queries at position p are multiplied by
                 1 + g log(1 + floor((p + a) / s))
    branch_scale  factor of what a branch adds to the state
    experts      None: a layer has one MLP; beside: it has both, whose results are normalised and added
    layer_inputs  the width of what a layer gets of each token beside its state, after its branches; 0: nothing
    layer_scale  each layer multiplies its state by a factor in the end
    sinks        each head has a score beside those of its keys
    gated_heads  each head's output is multiplied by the sigmoid of a gate, which lies behind its query
    delta        in place of attention; None: attention
    packing      how the linears of the layers are quantised in the files; None: they are not
    varied       for each layer the fields, by name, in which it is another: see `layer`; empty: all layers are alike
    """

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    max_position: int
    windows: tuple[int, ...]
    ropes: tuple[Rope | None, ...]
    scales: tuple[float, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    eos_ids: frozenset[int]
    head_bias: bool = False
    chunked: bool = False
    qk_norm: str = ""
    norm_last: bool = False
    value_norm: bool = False
    kv_layer: int = -1
    norm: str = "rms"
    norm_offset: float = 0.0
    parallel: bool = False
    activation: str = "silu"
    gated: bool = True
    embedding_scale: float = 1.0
    branch_scale: float = 1.0
    logit_scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    interleaved: bool = False
    query_growth: float = 0.0
    query_span: int = 0
    query_ahead: int = 0
    experts: Experts | None = None
    beside: bool = False
    layer_inputs: int = 0
    layer_scale: bool = False
    sinks: bool = False
    gated_heads: bool = False
    delta: DeltaNet | None = None
    tensors: Tensors = Tensors()
    packing: Packing | None = None
    varied: tuple[Mapping[str, Any], ...] = ()

    def layer(self, index: int) -> Architecture:
        """A decoder whose layers are all like this one."""
        return replace(self, **self.varied[index], varied=()) if self.varied else self

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def inner_width(self) -> int:
        """Outputs of the MLP's first linear."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def packed_bits(self) -> int:
        """Bits of a weight of a layer, where the files are quantised and precision auto leaves them so; else 0.

        Quantised weights take less memory, and a single text is faster. Plain ones round no activations and are faster
        with many texts, so they serve a small model of GGUF, whose quantisation was for its download.
        """
        if self.packing is None:
            return 0
        widths = sum(self.layer(index)._widths for index in range(self.layers))
        small = _PLAIN_BYTES * self.hidden * (widths + self.vocab_size) <= _SMALL
        return 0 if small and self.packing.method == GGUF else self.packing.bits

    @property
    def _widths(self) -> int:
        """Of the linears of a layer, `hidden` times which are its weights."""
        one = self.inner_width + self.intermediate
        mlps = one if self.experts is None or self.beside else 0
        if self.experts is not None:
            mlps += 3 * (self.experts.count * self.experts.width + self.experts.shared)
        if self.delta is not None:
            return self.delta.channels + 2 * self.delta.values + mlps
        return (3 if self.gated_heads else 2) * self.query_width + 2 * self.kv_width + mlps

    @property
    def is_one_operation(self) -> bool:
        """Whether kernels/network.cpp computes it: what differs from Llama is in the weights or in the attention."""
        plain = all(getattr(self, field) == getattr(Architecture, field) for field in _IN_PARTS)
        names = self.tensors
        ends = names.positions or names.attention_end or names.mlp_end
        return plain and not ends and self.qk_norm != "row"

    def share(self, ranks: int) -> Architecture:
        """What each of `ranks` processes computes: its part of the heads and of the MLP, between whole states.

        Raises InvalidInputError for a number that does not divide them, and for norms that need a whole row of queries.
        """
        if ranks == 1:
            return self
        require(self.experts is None, "tensor_parallel_size", ranks, f"1 for {self.family}: it has experts")
        require(not self.varied, "tensor_parallel_size", ranks, f"1 for {self.family}: its layers are not alike")
        for key, name in _SPLIT.items():
            whole = getattr(self, key)
            allowed = f"a divisor of {name} ({whole}) of the checkpoint"
            require(whole % ranks == 0, "tensor_parallel_size", ranks, allowed)
        allowed = f"1 for {self.family}: its norms are of all queries of a token together"
        require(self.qk_norm != "row", "tensor_parallel_size", ranks, allowed)
        require(self.packing is None, "tensor_parallel_size", ranks, "1 for a checkpoint that is quantised")
        return replace(self, **{key: getattr(self, key) // ranks for key in _SPLIT})

    def with_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
        """As the files with these tensors have it: as in transformers, what config.json ties but two tensors hold is
        not tied, and the one that there is serves for both. Experts may have tensors of their own, and those of all
        experts may be the other way around.

        Raises InvalidInputError for another count of experts than config.json has.
        """
        present = {self.tensors.today(name): shape for name, shape in shapes.items()}
        if self.experts is not None:
            self._require_count(self.experts, present)
            here = self._with_experts(self.experts, present)
            if here != self:
                return here.with_tensors(shapes)
        table, head = f"{self.tensors.embedding}.weight", f"{self.tensors.head}.weight"
        if not self.tied or head not in present:
            return self
        if present.keys() & {table, table.removeprefix(self.tensors.prefix)}:
            return replace(self, tied=False)
        older = ((name, table if today == head else today) for name, today in self.tensors.renamed)
        return replace(self, tensors=replace(self.tensors, renamed=((head, table), *older)))

    def _with_experts(self, experts: Experts, shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
        """Of gate_up and down at most one is square, so that no shapes of both fit both ways around."""
        if not experts.whole:
            return self
        names, module = self.tensors, self.tensors.expert_down.rpartition(".")[0]
        gate, up, down = (f"{module}.{{}}.{part}_proj" for part in ("gate", "up", "down"))
        if any(f".{down.format(0)}." in name for name in shapes):
            tensors = replace(names, expert_gate_up=(gate, up), expert_down=down)
            experts = replace(experts, whole=False, columns=False, alternating=False)
            return replace(self, experts=experts, tensors=tensors)
        both = (*names.expert_gate_up, names.expert_down)
        pairs = [[shapes.get(f"{names.layers}.{layer}.{name}") for name in both] for layer in range(self.layers)]
        rows = [(experts.count, 2 * experts.width, self.hidden), (experts.count, self.hidden, experts.width)]
        columns = [(count, inputs, outputs) for count, outputs, inputs in rows]
        if not experts.alternating and (rows in pairs) != (columns in pairs):
            return replace(self, experts=replace(experts, columns=columns in pairs))
        return self

    def _require_count(self, experts: Experts, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """By the routers: before the shape of each tensor is looked at, of which the first one may be any."""
        for layer in range(self.layers):
            shape = shapes.get(f"{self.tensors.layers}.{layer}.{self.tensors.router}.weight")
            scored = shape[0] if shape else experts.count
            allowed = f"{scored}: the weights hold so many experts in layer {layer}"
            require(scored == experts.count, experts.key, experts.count, allowed)

    @classmethod
    def read(cls, folder: Path) -> Architecture:
        """The architecture of the checkpoint in `folder`; generation_config.json may add end-of-sequence ids.

        Raises InvalidInputError with the key, its value and the supported values for anything that this runtime would
        compute differently from the model's training.
        """
        config = _json(folder / "config.json")
        generation = folder / "generation_config.json"
        extra = _json(generation).get("eos_token_id") if generation.is_file() else None
        return from_config(config, extra).with_tensors(tensor_shapes(folder))


# What kernels/network.cpp does not compute unless it is as in Llama.
_IN_PARTS = (
    *("head_bias", "norm", "parallel", "activation", "gated"),
    *("branch_scale", "logit_scale", "logit_cap", "experts", "sinks", "norm_last", "chunked", "varied"),
    *("value_norm", "layer_inputs", "layer_scale", "gated_heads", "delta"),
)

# What the ranks of tensor parallelism divide, and what Llama's config.json calls it.
_SPLIT = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
}

_MODULES = {
    "llama": (
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3"),
        *("seed_oss", "arcee", "helium", "ernie4_5", "glm", "glm4", "cwm", "exaone4", "granite", "hyperclovax"),
        *("internlm3", "hunyuan_v1_dense"),
    ),
    "experts": (
        *("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "flex_olmo", "ernie4_5_moe", "hunyuan_v1_moe"),
        *("llama4_text", "minimax_m2", "granitemoe", "granitemoeshared", "granitemoehybrid", "gpt_oss"),
    ),
    "hybrid": ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    "deepseek": ("glm4_moe", "solar_open", "dots1", "exaone_moe", "hy_v3"),
    "layer_norm": ("phi", "starcoder2", "stablelm", "nemotron", "cohere", "cohere2"),
    "gemma": ("gemma", "gemma2", "gemma3_text"),
    "gemma4": ("gemma4_text",),
    "gpt": ("gpt2", "gptj", "gpt_neox"),
}
FAMILIES: Choices[Callable[[Mapping[str, Any]], Architecture]] = Choices(
    "model_type",
    {name: f"{_FAMILIES}.{module}:{name}" for module, names in _MODULES.items() for name in names},
)
"""From the content of a config.json to its architecture, by `model_type`; without the ids of generation_config.json."""
# Text models that exist within models of texts and images alone.
_TEXT_PARTS: Choices[Callable[[Mapping[str, Any]], Architecture]] = Choices(
    "model_type", {"qwen3_vl_moe_text": f"{_FAMILIES}.experts:qwen3_vl_moe_text"}
)


# Why a family is not one of these, by keys of its config.json; the first one counts.
_REASONS = {
    ("altup_num_inputs",): "several states of each token",
    ("kv_lora_rank",): "latent attention",
    ("state_size", "mamba_d_state", "ssm_state_size", "linear_num_value_heads"): "layers that are no attention",
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): "a mixture of experts of another form",
    ("vision_config", "audio_config"): "inputs beside text",
    ("is_encoder_decoder", "cross_attention_hidden_size", "d_kv"): "an encoder",
}
_WRAPPERS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "gemma4": {},
    "gemma4_unified": {
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
        "hidden_size_per_layer_input": 0,
    },
    "mistral3": {},
    "llama4": {},
    "qwen3_5": {"tie_word_embeddings": False},
    "qwen3_5_moe": {"tie_word_embeddings": False},
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {"head_dim": 128},
    "qwen3_vl_moe": {"tie_word_embeddings": False},
}
"""Models of texts and images whose text model is served, and what a config.json may leave out of its `text_config`."""
# Those whose text model is, for texts alone, that of another family.
_TEXT_MODELS = {"gemma4_unified": "gemma4_text", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
# How files of such a model call the tensors of the text model, and those of the rest.
_WRAPPED = (("model.language_model.", "model."), ("language_model.", ""))
_BESIDE_TEXT = (
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    *("vision_model.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.", "model.vision_embedder."),
    *("visual.", "model.visual."),
)


def from_config(config: Mapping[str, Any], generation_eos: object = None) -> Architecture:
    """The architecture that the content of a config.json describes. Raises InvalidInputError."""
    family, text = config.get("model_type"), config.get("text_config")
    if text is None and isinstance(family, str) and family in _TEXT_MODELS:
        # Older files state the text model's values beside those of the rest.
        text = config
    if isinstance(family, str) and family in _WRAPPERS and isinstance(text, Mapping):
        # What is stated once for the whole model.
        default = _WRAPPERS[family].get("tie_word_embeddings", True)
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", default)}
        whole = {key: config[key] for key in ("quantization_config",) if key in config}
        kind = {"model_type": _TEXT_MODELS[family]} if family in _TEXT_MODELS else {}
        inner = from_config({**_WRAPPERS[family], **whole, **text, **tied, **kind}, generation_eos)
        # A chat model may state the end of a turn for the whole model alone, and that of a text for its text model.
        ends = inner.eos_ids | token_ids(config.get("eos_token_id"), inner.vocab_size)
        others = (*inner.tensors.others, *_BESIDE_TEXT)
        return replace(inner, tensors=replace(inner.tensors, wrapped=_WRAPPED, others=others), eos_ids=ends)
    both = {**text, **config} if isinstance(text, Mapping) else config
    reason = next((reason for keys, reason in _REASONS.items() if any(both.get(key) for key in keys)), "")
    allowed = f"{reason and f'this one has {reason}; '}one of {', '.join(FAMILIES)} (config.json)"
    name = family if isinstance(family, str) else ""
    families = _TEXT_PARTS if name in _TEXT_PARTS else FAMILIES
    require(name in families, "model_type", family, allowed)
    architecture = replace(families[name](config), packing=packing_of(config))
    more = token_ids(generation_eos, architecture.vocab_size)
    return architecture if more <= architecture.eos_ids else replace(architecture, eos_ids=architecture.eos_ids | more)


def token_ids(ids: object, vocab_size: int) -> frozenset[int]:
    """The ids of an `eos_token_id`: one, several or none. Raises InvalidInputError."""
    values = [] if ids is None else ids if isinstance(ids, list) else [ids]
    for value in values:
        valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
        require(valid, "eos_token_id", ids, f"ids from 0 to {vocab_size - 1}")
    return frozenset(values)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InvalidInputError("checkpoint", str(path.parent), f"must hold a readable {path.name}") from None
    except ValueError as error:
        raise InvalidInputError("checkpoint", str(path), f"not JSON: {error}") from None
    require(isinstance(content, dict), "checkpoint", str(path), "a JSON object")
    return dict(content)
