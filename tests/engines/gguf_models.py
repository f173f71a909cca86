"""Small GGUF files of Llamas with random weights, as the package `gguf` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
LINEARS = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
# The printable bytes stand for themselves, the others follow from 256 on; then come merges and control tokens.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = len(TOKENS) - 1
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e4,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in TOKENS],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": END - 1,
    "tokenizer.ggml.eos_token_id": END,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}


def write(
    file: Path,
    kinds: Mapping[str, str] = {},
    changes: Mapping[str, Any] = {},
    without: tuple[str, ...] = (),
    architecture: str = "llama",
    seed: int = 0,
    tensors: Mapping[str, np.ndarray[Any, Any]] = {},
    experts: int = 0,
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Write a model; returns its tensors before they are quantised, by the names of GGUF.

    kinds: the type of the tensors whose name has this part, such as attn_q; F32 otherwise. changes, without: values of
    the metadata, and those that are left out; tensors: further ones; experts: of each layer, in place of its MLP.
    """
    writer = GGUFWriter(file, architecture)
    for key, value in {**METADATA, **changes}.items():
        if key not in without:
            add(writer, key, value)
    chance = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in LINEARS.items():
            if experts and name.startswith("ffn"):
                shapes[f"blk.{layer}.{name}_exps"] = (experts, *shape)
            else:
                shapes[f"blk.{layer}.{name}"] = shape
        if experts:
            shapes[f"blk.{layer}.ffn_gate_inp"] = (experts, HIDDEN)
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    made: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {
        f"{name}.weight": (chance.normal(size=shape) * 0.3 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name, values in {**made, **tensors}.items():
        kind = GGMLQuantizationType[kinds.get(name.split(".")[-2], "F32")]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def all_linears(kind: str) -> dict[str, str]:
    return dict.fromkeys(LINEARS, kind)
