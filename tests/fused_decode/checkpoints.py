"""A whole checkpoint, small and random, with a tokenizer of its own."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 400
LONGEST = 8192
_TEXTS = (
    "Return the number of items in a container.",
    "Raise ValueError if the value is not present; der Käse ist größer als die Übung.",
    "東京は日本の首都です。 Open file and return a stream 🙂.",
)
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


def make_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A Llama of two layers with byte-level BPE; what it says means nothing."""
    import torch
    from safetensors.torch import save_file

    from shapeshift.fused_decode.model.architecture import Architecture
    from shapeshift.fused_decode.model.tensor_layout import shapes

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    _tokenizer(folder / "tokenizer.json")
    chance = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=chance) * 0.3
        for name, shape in shapes(Architecture.read(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _tokenizer(file: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(_TEXTS * 3, trainer)
    made.save(str(file))
