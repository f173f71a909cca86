"""A whole checkpoint, small and random, with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

TEXTS = (
    "Return the number of items in a container.",
    "Raise ValueError if the value is not present; der Käse ist größer als die Übung.",
    "東京は日本の首都です。 Open file and return a stream 🙂.",
)


def make_checkpoint(folder: Path, vocabulary: int = 400, seed: int = 0) -> Path:
    """A Llama of two layers with byte-level BPE; what it says means nothing."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
