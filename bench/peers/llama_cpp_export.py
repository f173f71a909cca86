"""Write a Llama as GGUF for llama.cpp, in its environment: `llama_cpp_export.py CHECKPOINT FILE WEIGHTS`.

WEIGHTS: f32, bf16, int8 (Q8_0) or int4 (Q4_0: groups of 32, the table in Q8_0, which is the output head too). The
checkpoint is one file with tied embeddings. The vocabulary is left out: prompts and answers are tokens.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Values = NDArray[np.float32]
KINDS = {"f32": Kind.F32, "bf16": Kind.BF16, "int8": Kind.Q8_0, "int4": Kind.Q4_0}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TABLE = "token_embd"


def main() -> None:
    checkpoint, file, weights = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["model_type"] == "llama" and config["tie_word_embeddings"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, values in tensors(checkpoint / "model.safetensors"):
        tensor = renamed(name)
        if tensor.endswith(("attn_q", "attn_k")):
            values = in_turns(values, heads if tensor.endswith("q") else kv_heads)
        kind = Kind.F32 if values.ndim == 1 else KINDS[weights]
        if tensor == TABLE and weights == "int4":
            kind = Kind.Q8_0
        writer.add_tensor(f"{tensor}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renamed(name: str) -> str:
    """GGUF's name of a tensor, without `.weight`."""
    plain = name.removeprefix("model.").removesuffix(".weight")
    if plain.startswith("layers."):
        _, number, part = plain.split(".", 2)
        return f"blk.{number}.{LAYER[part]}"
    return {"embed_tokens": TABLE, "norm": "output_norm"}[plain]


def in_turns(weight: Values, heads: int) -> Values:
    """The rows of a weight as llama.cpp turns them: pairs lie side by side, not half a head apart."""
    rows, inputs = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def tensors(file: Path) -> Iterator[tuple[str, Values]]:
    """Names and values, in f32, of a safetensors file in F32 or BF16."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        start = opened.tell()
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind = {"F32": np.float32, "BF16": np.uint16}[entry["dtype"]]
        place = start + entry["data_offsets"][0]
        values = np.memmap(file, kind, "r", place, tuple(entry["shape"]))
        yield name, values if kind is np.float32 else (values.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    main()
