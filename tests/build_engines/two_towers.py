"""Small random checkpoints of CLIP and SigLIP with both towers, their tokenizers, and what the library computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIDE, TEXTS = 32, 28
MEAN, STD = (0.48, 0.46, 0.41), (0.23, 0.22, 0.27)
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_VISION = {**_SIZES, "image_size": SIDE, "patch_size": 8}


def write(folder: Path, family: str) -> Any:
    """Write the checkpoint of `clip` or `siglip` into `folder`; returns the library's model."""
    import torch
    import transformers

    torch.manual_seed(5)
    tokenizer = _clip_tokenizer(transformers) if family == "clip" else _siglip_tokenizer(transformers)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    text = {**_SIZES, **special, "vocab_size": len(tokenizer), "max_position_embeddings": TEXTS}
    stem = "CLIP" if family == "clip" else "Siglip"
    config = getattr(transformers, f"{stem}Config")(text_config=text, vision_config=_VISION, projection_dim=24)
    model = getattr(transformers, f"{stem}Model")(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim:
            weight.data = 0.2 * torch.randn_like(weight) if "norm" not in name else weight.data + 0.1
    model.logit_scale.data.fill_(1.5)
    if family == "siglip":
        model.logit_bias.data.fill_(-0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": f"{stem}ImageProcessor",
        "size": {"shortest_edge": SIDE} if family == "clip" else {"height": SIDE, "width": SIDE},
        **({"crop_size": {"height": SIDE, "width": SIDE}} if family == "clip" else {}),
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def inputs_of(folder: Path, family: str, texts: Sequence[str]) -> Any:
    """The library's tokens of texts, as its processor pads them for the model."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    padding = True if family == "clip" else "max_length"
    options = {"padding": padding, "truncation": True, "max_length": TEXTS, "return_tensors": "pt"}
    inputs = tokenizer([*texts], **options)
    return inputs if family == "clip" else {"input_ids": inputs["input_ids"]}


def normal(pixels: Any) -> Any:
    """As the library's processor makes pixels [n, side, side, 3] of 0..255."""
    import torch

    values = (torch.from_numpy(pixels) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return values.permute(0, 3, 1, 2)


def _clip_tokenizer(transformers: Any) -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    names = [*letters, *(f"{letter}</w>" for letter in letters), "ca", "cat</w>", "<|startoftext|>", "<|endoftext|>"]
    vocab = {name: number for number, name in enumerate(names)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[("c", "a"), ("ca", "t</w>")])


def _siglip_tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(40)), "cat", "dog", "a"]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=["input_ids"], **named)
