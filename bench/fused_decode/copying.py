"""A Llama of 135 million parameters that copies, and prompts that it copies with a few corrections.

Its body is random. Its head makes the most likely token the successor of the last one in a fixed order, in which each
cycle of PERIOD tokens is a text. A prompt is such a text with a share of its tokens replaced; the answer is the text
itself. So it agrees with the prompt in long pieces and differs in single tokens, like a summary that quotes. An
iteration takes as long as with any other weights of these sizes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.peers import random_llama

PERIOD = 128
REPLACED = 0.1
_SPECIAL = 2
_SCALE = 100.0
"""Of the embeddings, so that the last token outweighs what the random layers add."""


def ensure(source: Path, folder: Path) -> Path:
    """`folder` with the copying model made of the random one in `source`; made if missing, which takes seconds."""
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            os.link(source / name, folder / name)
        _weights(source, folder)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=1))
    return folder


def texts() -> NDArray[np.int64]:
    """The cycles, INT64 [texts, PERIOD]: each token's successor is the next one, that of the last one the first."""
    tokens = np.random.default_rng(random_llama.SEED).permutation(
        np.arange(_SPECIAL, random_llama.VOCABULARY, dtype=np.int64)
    )
    return tokens[: len(tokens) // PERIOD * PERIOD].reshape(-1, PERIOD)


def prompts(count: int, rng: np.random.Generator) -> list[list[int]]:
    """`count` different texts, each with a share of REPLACED of its tokens replaced, but for its last few ones."""
    made = texts()[rng.permutation(len(texts()))[:count]].copy()
    for text in made:
        places = np.flatnonzero(rng.random(PERIOD - 4) < REPLACED)
        text[places] = rng.integers(_SPECIAL, random_llama.VOCABULARY, len(places))
    return [text.tolist() for text in made]


def _weights(source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    plain = tensors[name]
    tensors[name] = plain * _SCALE
    # A token is likely after its predecessor.
    cycles = torch.from_numpy(texts())
    head = plain.clone()
    head[cycles.roll(-1, dims=1).flatten()] = plain[cycles.flatten()]
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
