"""The models of the decode benchmark: Llamas of 110 million and of a billion random parameters, and their tokenizer."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

VOCABULARY, EOS = 32000, 1
SEED = 0
LENGTH = 8192
"""The longest text."""


@dataclass(frozen=True)
class Size:
    """The shape of a model; `dtype`: of its weights in the file."""

    parameters: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dtype: str

    @property
    def stamp(self) -> dict[str, int]:
        return {"parameters": self.parameters, "vocabulary": VOCABULARY, "seed": SEED, "form": 2}


SIZES = {
    "110m": Size(109_529_856, hidden=768, inner=2048, layers=12, heads=12, kv_heads=12, dtype="float32"),
    "1b": Size(1_038_682_112, hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, dtype="bfloat16"),
}


def ensure(folder: Path, size: Size = SIZES["110m"]) -> Path:
    """`folder` with config.json, model.safetensors and tokenizer.json; made if missing, which takes a minute."""
    stamp = folder / "made.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != size.stamp:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _weights(folder, size)
        _tokenizer(folder)
        stamp.write_text(json.dumps(size.stamp))
    return folder


def words(folder: Path) -> list[int]:
    """Tokens that are a space and a word: a text of such tokens encodes to the same tokens."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(number for token, number in vocabulary.items() if re.fullmatch("\u0120[A-Za-z]+", token))


def _weights(folder: Path, size: Size) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    assert model.num_parameters() == size.parameters, model.num_parameters()
    model.to(getattr(torch, size.dtype)).save_pretrained(folder)
    # Versions of transformers before 5 expect it outside rope_parameters.
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"rope_theta": 10000.0}, indent=1))


def _tokenizer(folder: Path) -> None:
    """Byte-level BPE trained on the standard library's sources, with as many tokens as the model has embeddings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text(errors="replace") for path in _sources()), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _sources() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(library.rglob("*.py")) if not {"site-packages", "test"} & set(path.parts)]
