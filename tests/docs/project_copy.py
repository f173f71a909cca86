"""A copy of the project in which the pages' commands run: what they write stays out of the project itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.docs.docs_pages import PROJECT
from tests.token_adapt.timm_models import small_checkpoint

# Folders that commands add to: the copy has the folder itself, and links to what the project's folder holds.
_GROWING = ("engines", "repository", "adapters", "checkpoints")
# What the pages call the reader's own files.
MODELS = "/models/"
_WORDS = ("a", "text", "of", "any", "length", "good", "bad", "music", "weather", "play", "is", "the", "it", "rain")


def copy_project(root: Path) -> Path:
    """The project in the empty folder `root`: links, except `build/` and `model_repository/`, which may change."""
    for entry in PROJECT.iterdir():
        if entry.name not in ("build", "model_repository"):
            (root / entry.name).symlink_to(entry)
    shutil.copytree(PROJECT / "model_repository", root / "model_repository")
    for entry in (PROJECT / "build").iterdir():
        if entry.name in _GROWING:
            for child in entry.iterdir():
                _link(root / "build" / entry.name / child.name, child)
        elif entry.is_dir() and entry.name != "run":
            _link(root / "build" / entry.name, entry)
    return root


def own_files(folder: Path) -> Path:
    """The files that the pages call `/models/...`, made small: checkpoints, an adapter, labelled images and texts."""
    small_checkpoint(folder / "my-vit")
    _link(folder / "my-llama", PROJECT / "checkpoints" / "docstrings-llama")
    shutil.copytree(PROJECT / "checkpoints" / "docstrings-adapters" / "shout", folder / "my-adapter")
    config = folder / "my-adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"docstrings-llama"', '"my-llama"'))
    _images(folder / "my-photos")
    _bert(folder / "my-bert", "AutoModel", layers=1)
    _bert(folder / "my-small", "AutoModelForSequenceClassification", layers=1)
    large = _bert(folder / "my-large", "AutoModelForSequenceClassification", layers=4)
    _labelled_texts(folder / "my-sample.jsonl", folder / "my-large", large)
    return folder


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _images(folder: Path) -> None:
    from PIL import Image

    for label, colour in (("poppy", (200, 30, 20)), ("iris", (60, 40, 190))):
        (folder / label).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (40 + number, 40), colour).save(folder / label / f"{number}.png")


def _bert(folder: Path, kind: str, layers: int) -> Any:
    """A BERT with random weights and a tokenizer of a few words."""
    import tokenizers
    import torch
    import transformers

    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *_WORDS))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    labels: dict[str, Any] = {"num_labels": 3}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=384,
        num_hidden_layers=layers,
        num_attention_heads=6,
        intermediate_size=128,
        **labels,
    )
    torch.manual_seed(layers)
    model = getattr(transformers, kind).from_config(config).eval()
    # As they are drawn, the weights are too small for the answer to depend on the text.
    for weight in model.parameters():
        weight.data *= 4 if weight.ndim > 1 else 1
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def _labelled_texts(file: Path, checkpoint: Path, model: Any) -> None:
    """Texts with the labels that `model` gives them, so that it is the more accurate of two models."""
    import tokenizers
    import torch

    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    random = np.random.default_rng(0)
    lines = []
    for _ in range(60):
        text = " ".join(random.choice(_WORDS, random.integers(3, 9)))
        with torch.inference_mode():
            label = int(model(torch.tensor([tokenizer.encode(text).ids])).logits.argmax())
        lines.append(json.dumps({"text": text, "label": f"LABEL_{label}"}))
    file.write_text("\n".join(lines))
