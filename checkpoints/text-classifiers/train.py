"""Make the classifiers: `.venv/bin/python checkpoints/text-classifiers/train.py` (15 minutes on two cores).

A classifier is a linear head over the mean-pooled vector of the first layers of all-MiniLM-L6-v2. Where such vectors do
not tell the labels apart, low-rank updates of the encoder's linear layers are trained with the head. Writes
TASK-LAYERS.safetensors in f16 beside itself, and prints the accuracies. Seeded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from texts import HERE, PARTS, PROJECT, TASKS, Part, arguments
from torch import nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

BASE = PROJECT / "build" / "checkpoints" / "all-MiniLM-L6-v2"
TUNED = ("sst2",)
"""The tasks whose encoder is updated."""
LAYERS = {"clinc150": (1, 6), "domains": (1, 6), "scope": (1, 6), "sst2": (3, 6)}
SEED = 0

HEAD_EPOCHS, HEAD_BATCH, HEAD_RATE, HEAD_DECAY = 40, 256, 3e-3, 2e-3
LEAST_SPREAD = 0.1
"""The least standard deviation by which a component is scaled, as a share of the components' median."""
RANK, EPOCHS, BATCH, RATE, DECAY, DROPOUT, MAX_TOKENS = 8, 5, 32, 1e-3, 0.01, 0.1, 128
POOL = 50
"""Batches whose texts are sorted by length as one pool."""
LINEARS = ("query", "key", "value", "dense")


class UpdatedLinear(nn.Module):
    """A frozen linear layer, and the update B A of its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.lora_A = nn.Parameter(torch.randn(RANK, linear.in_features) / linear.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        return self.linear(values) + (values @ self.lora_A.T) @ self.lora_B.T


class Encoder(nn.Module):
    """The first layers of the encoder, frozen; updates: of its linear layers by name, if it is tuned."""

    def __init__(self, layers: int, is_tuned: bool) -> None:
        super().__init__()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(BASE)
        options: dict[str, Any] = {"num_hidden_layers": layers, "add_pooling_layer": False, "dtype": torch.float32}
        self.model: Any = AutoModel.from_pretrained(BASE, **options).requires_grad_(False)
        self.updates: dict[str, UpdatedLinear] = {}
        for name, linear in list(self.model.encoder.named_modules()) if is_tuned else []:
            parent, _, part = name.rpartition(".")
            if part in LINEARS:
                self.updates[f"encoder.{name}"] = UpdatedLinear(linear)
                setattr(self.model.encoder.get_submodule(parent), part, self.updates[f"encoder.{name}"])

    def forward(self, texts: Sequence[str]) -> torch.Tensor:
        """The mean of the tokens' vectors [texts, hidden]."""
        limits: dict[str, Any] = {"truncation": True, "max_length": MAX_TOKENS}
        inputs = self._tokenizer(list(texts), padding=True, return_tensors="pt", **limits)
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.training):
            hidden = self.model(**inputs).last_hidden_state
        return (hidden.float() * mask).sum(1) / mask.sum(1)

    @torch.no_grad()
    def vectors(self, texts: Sequence[str]) -> torch.Tensor:
        """Those of all texts, computed in batches of similar length."""
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        vectors = torch.zeros(len(texts), self.model.config.hidden_size)
        for start in range(0, len(texts), 2 * BATCH):
            rows = order[start : start + 2 * BATCH]
            vectors[rows] = self([texts[row] for row in rows])
        return vectors


def batches(lengths: torch.Tensor) -> list[torch.Tensor]:
    """The rows of an epoch's batches, in random order; a batch holds texts of similar length, to save padding."""
    pools = torch.randperm(len(lengths)).split(BATCH * POOL)
    pooled = [batch for pool in pools for batch in pool[lengths[pool].argsort()].split(BATCH)]
    return [pooled[index] for index in torch.randperm(len(pooled)).tolist()]


def tune(encoder: Encoder, texts: Sequence[str], truth: torch.Tensor, weights: torch.Tensor) -> nn.Linear:
    """Train the updates of `encoder`, and a head over them."""
    head = nn.Linear(encoder.model.config.hidden_size, len(weights))
    updates = [parameter for one in encoder.updates.values() for parameter in (one.lora_A, one.lora_B)]
    groups: list[dict[str, Any]] = [{"params": updates}, {"params": head.parameters()}]
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY)
    lengths = torch.tensor([len(text) for text in texts])
    steps = EPOCHS * len(batches(lengths))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [RATE, 2 * RATE], steps, pct_start=0.1)
    encoder.train()
    for _ in range(EPOCHS):
        for rows in batches(lengths):
            vectors = encoder([texts[row] for row in rows.tolist()])
            logits = head(nn.functional.dropout(vectors, DROPOUT))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, truth[rows], weight=weights).backward()
            nn.utils.clip_grad_norm_(updates, 1.0)
            optimizer.step()
            schedule.step()
    encoder.eval()
    return head


def train_head(vectors: torch.Tensor, truth: torch.Tensor, weights: torch.Tensor) -> nn.Linear:
    """A head over fixed vectors. They are scaled to unit variance; the scaling is then folded into the head."""
    mean, spread = vectors.mean(0), vectors.std(0)
    spread = spread.clamp(min=LEAST_SPREAD * float(spread.median()))
    scaled = (vectors - mean) / spread
    head = nn.Linear(vectors.shape[1], len(weights))
    optimizer = torch.optim.AdamW(head.parameters(), lr=HEAD_RATE, weight_decay=HEAD_DECAY)
    steps = HEAD_EPOCHS * -(-len(vectors) // HEAD_BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(HEAD_EPOCHS):
        for rows in torch.randperm(len(vectors)).split(HEAD_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(scaled[rows]), truth[rows], weight=weights).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        head.weight.div_(spread)
        head.bias.sub_(head.weight @ mean)
    return head


def train(task: str, parts: dict[str, Part], layers: int, is_tuned: bool, folder: Path) -> None:
    """Train one classifier, write it, and print its accuracy on each part."""
    torch.manual_seed(SEED)
    labels = sorted({label for _, label in parts["train"]})
    texts = {part: [text for text, _ in parts[part]] for part in PARTS}
    truth = {part: torch.tensor([labels.index(label) for _, label in parts[part]]) for part in PARTS}
    # Classes count as often as they come in `val`.
    val, train = (np.bincount(truth[part]) / len(truth[part]) for part in ("val", "train"))
    weights = torch.from_numpy(val / train).float()
    encoder = Encoder(layers, is_tuned).eval()
    tuned = tune(encoder, texts["train"], truth["train"], weights) if is_tuned else None
    vectors = {part: encoder.vectors(texts[part]) for part in PARTS}
    head = tuned or train_head(vectors["train"], truth["train"], weights)
    tensors = dict(head.named_parameters())
    for layer, update in encoder.updates.items():
        tensors |= {f"{layer}.lora_A": update.lora_A, f"{layer}.lora_B": update.lora_B}
    stored = {name: value.detach().half() for name, value in tensors.items()}
    save_file(stored, folder / f"{task}-{layers}.safetensors", metadata={"labels": json.dumps(labels)})
    right = {part: (head(vectors[part]).argmax(1) == truth[part]).float().mean() for part in PARTS}
    print(task, layers, *(f"{part} {100 * float(share):.2f}%" for part, share in right.items()), flush=True)


def main() -> None:
    """Train the classifiers of the tasks."""
    parser = arguments(__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--layers", help="of each task's classifiers; default: those that are here")
    parser.add_argument("--tuned", action="store_true", help="update the encoder, as is always done for sst2")
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    for task in options.tasks.split(","):
        parts = TASKS[task](options.data)
        for layers in map(int, options.layers.split(",")) if options.layers else LAYERS[task]:
            train(task, parts, layers, options.tuned or task in TUNED, options.to)


if __name__ == "__main__":
    main()
