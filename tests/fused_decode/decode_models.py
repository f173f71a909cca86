"""Tiny models with random weights, their checkpoints, and batches that mix decode rows with prefill chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shapeshift.fused_decode.interfaces import StepBatch

VOCAB = 211
WINDOW = 9
LONGEST = 96
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "mistral": {"sliding_window": WINDOW, "num_key_value_heads": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"head_dim": 32, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
}


@dataclass(frozen=True)
class Tiny:
    """A reference model of transformers, and its checkpoint."""

    name: str
    reference: Any
    folder: Path


def make(name: str, folder: Path, spread: float = 0.12, **changes: Any) -> Tiny:
    """A model of a family of FAMILIES; `spread` is the standard deviation of its weights."""
    import transformers

    kind = "llama" if name.startswith("llama") else name
    options = _COMMON | FAMILIES[name] | changes | {"initializer_range": spread}
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(len(name))
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter, tensor in reference.named_parameters():
        if parameter.endswith("bias") or "norm" in parameter:
            torch.nn.init.normal_(tensor, 1.0 if "norm" in parameter else 0.0, 0.2)
    transformers.utils.logging.disable_progress_bar()
    reference.save_pretrained(folder)
    return Tiny(name, reference, folder)


def texts(count: int, seed: int, shortest: int = 20) -> list[torch.Tensor]:
    """Random token ids, INT64 [length] each."""
    rng = random.Random(seed)
    return [torch.tensor([rng.randrange(VOCAB) for _ in range(rng.randint(shortest, LONGEST))]) for _ in range(count)]


class Model(Protocol):
    """What computes the logits of a batch."""

    def forward(self, batch: StepBatch) -> torch.Tensor: ...


def teacher_forced(
    model: Model, given: list[torch.Tensor], slots: list[int], seed: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Feed all texts in random steps: some of them in each, single tokens beside chunks, some logits wanted.

    Yields (text, place of the token in it, logits after that token).
    """
    rng = random.Random(seed)
    done = [0] * len(given)
    while live := [text for text, tokens in enumerate(given) if done[text] < len(tokens)]:
        rows = rng.sample(live, rng.randint(1, len(live)))
        lengths = [min(len(given[row]) - done[row], rng.choice((*[1] * 20, 2, 5, 17, 41))) for row in rows]
        wanted = sorted(rng.sample(range(len(rows)), max(0, len(rows) - rng.randint(0, 2))))
        pieces = [given[row][done[row] : done[row] + length] for row, length in zip(rows, lengths, strict=True)]
        spans = [len(given[row]) for row in rows]
        step = batch(pieces, [slots[row] for row in rows], [done[row] for row in rows], wanted, spans)
        logits = model.forward(step)
        for row, length in zip(rows, lengths, strict=True):
            done[row] += length
        yield from ((rows[row], done[rows[row]] - 1, logits[place]) for place, row in enumerate(wanted))


def batch(
    pieces: list[torch.Tensor],
    slots: list[int],
    starts: list[int],
    wanted: list[int] | None = None,
    spans: list[int] | None = None,
) -> StepBatch:
    """A batch of rows; all logits are wanted unless said otherwise."""
    return StepBatch(
        tokens=torch.cat(pieces),
        slots=torch.tensor(slots, dtype=torch.int32),
        starts=torch.tensor(starts, dtype=torch.int32),
        lengths=torch.tensor([len(piece) for piece in pieces], dtype=torch.int32),
        logit_rows=torch.tensor(range(len(pieces)) if wanted is None else wanted, dtype=torch.int64),
        spans=None if spans is None else torch.tensor(spans, dtype=torch.int32),
    )
