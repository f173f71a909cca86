"""Where the text models of transformers keep the parts of an encoder: one layout for each `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
"""What the kernels compute, in the order of `Activation`."""
SAME_ACTIVATION = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
# Their cosines depend on the length of the text.
_ROTATIONS_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Layout:
    """Names of modules; empty: there is none.

    words, positions, types, norm, project  of the embeddings, in the model: tables, their norm, and the linear after it
    layers, last      in the model: the list of layers, the norm after them
    shares_layers     whether `layers` are groups of layers that are computed again and again
    qkv, output       of a layer: linears of attention, one of all three or one each
    query_norm, key_norm, scaled  of a layer: norms of the heads, and the module that states how scores are scaled
    up, down          of a layer: linears of the MLP; two where it is gated, the one of the activation first
    gated             whether one linear computes both
    pre, after, post  of a layer: norms of attention and of the MLP: of what it takes, of what it adds, of the sum
    rotation, rotation_by_type  in the model: the module of cosines and sines, and whether layers differ in it
    distances         in the model: the embedding of distances that is added to scores
    places            in the model: the module that embeds distances; linears of attention make keys and queries of them
    activation        in the configuration
    norms_add_one     whether norms multiply by their weight plus 1
    """

    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"
    project: str = ""
    layers: str = "encoder.layer"
    last: str = ""
    shares_layers: bool = False
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    query_norm: str = ""
    key_norm: str = ""
    scaled: str = ""
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    gated: bool = False
    pre: tuple[str, str] = ("", "")
    after: tuple[str, str] = ("", "")
    post: tuple[str, str] = ("attention.output.LayerNorm", "output.LayerNorm")
    rotation: str = ""
    rotation_by_type: bool = False
    distances: str = ""
    places: str = ""
    activation: str = "hidden_act"
    norms_add_one: bool = False


_BERT = Layout()
_QWEN2 = Layout(
    words="embed_tokens",
    positions="",
    types="",
    norm="",
    layers="layers",
    last="norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    scaled="self_attn",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    pre=("input_layernorm", "post_attention_layernorm"),
    post=("", ""),
    rotation="rotary_emb",
)
_NOMIC = replace(
    _QWEN2,
    words=_BERT.words,
    types=_BERT.types,
    norm=_BERT.norm,
    last="",
    pre=("", ""),
    post=("post_attention_layernorm", "post_mlp_layernorm"),
)
_QWEN3 = replace(_QWEN2, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
    "distilbert": replace(
        _BERT,
        types="",
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        up=("ffn.lin1",),
        down="ffn.lin2",
        post=("sa_layer_norm", "output_layer_norm"),
        activation="activation",
    ),
    "mpnet": replace(
        _BERT,
        types="",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        post=("attention.LayerNorm", "output.LayerNorm"),
        distances="encoder.relative_attention_bias",
    ),
    "albert": replace(
        _BERT,
        project="encoder.embedding_hidden_mapping_in",
        layers="encoder.albert_layer_groups",
        shares_layers=True,
        qkv=("attention.query", "attention.key", "attention.value"),
        output="attention.dense",
        up=("ffn",),
        down="ffn_output",
        post=("attention.LayerNorm", "full_layer_layer_norm"),
    ),
    "deberta-v2": replace(
        _BERT,
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        places="encoder",
    ),
    "electra": replace(_BERT, project="embeddings_project"),
    "modernbert": Layout(
        words="embeddings.tok_embeddings",
        positions="",
        types="",
        norm="embeddings.norm",
        layers="layers",
        last="final_norm",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        up=("mlp.Wi",),
        down="mlp.Wo",
        gated=True,
        pre=("attn_norm", "mlp_norm"),
        post=("", ""),
        rotation="rotary_emb",
        rotation_by_type=True,
        activation="hidden_activation",
    ),
    **dict.fromkeys(("qwen2", "llama", "eurobert"), _QWEN2),
    **dict.fromkeys(("nomic_bert", "gte"), _NOMIC),
    "jina_embeddings_v3": replace(_NOMIC, up=("mlp.fc1",), down="mlp.fc2"),
    "qwen3": _QWEN3,
    "gemma3_text": replace(
        _QWEN3,
        pre=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
        rotation_by_type=True,
        activation="hidden_activation",
        norms_add_one=True,
    ),
}


def refusal(config: Mapping[str, Any]) -> str:
    """Why the kernels do not compute a text model of this config.json; empty: they do, as far as it tells.

    What it does not tell, such as distances that skip a bucket, shows when the model is exported.
    """
    kind = str(config.get("model_type", ""))
    layout = LAYOUTS.get(kind)
    if layout is None:
        return f"model_type: provider native computes {', '.join(LAYOUTS)}, not {kind!r}"
    activation = str(config.get(layout.activation, ACTIVATIONS[0]))
    if SAME_ACTIVATION.get(activation, activation) not in ACTIVATIONS:
        return f"{layout.activation}: provider native computes {', '.join(ACTIVATIONS)}, not {activation}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ways = [one.get("rope_type", one.get("type")) for one in (rope, *rope.values()) if isinstance(one, Mapping)]
    if way := next((way for way in ways if way in _ROTATIONS_BY_LENGTH), ""):
        return f"rope_parameters: provider native computes no rope_type {way}"
    width = config.get("hidden_size")
    if layout.places and (config.get("conv_kernel_size") or (config.get("embedding_size") or width) != width):
        return "conv_kernel_size, embedding_size: not of a DeBERTa on native; set provider openvino"
    return ""
