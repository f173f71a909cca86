"""Fine-tunes the first 2, 3 and all 6 layers of all-MiniLM-L6-v2 for the tasks of `bench.cascade`.

    python -m bench.cascade.train --tasks clinc150,sst2 --depths 2,3,6

Writes encoders to build/bench/cascade/checkpoints/<task>-<depth>/, with their accuracies, and beside each its linear
head over the mean-pooled vector. Existing models are kept. Seeded; texts of similar length share a batch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from bench.cascade.datasets import TASKS, Splits, read
from shapeshift.cascade.profiling.samples import Sample

BASE = Path("build/checkpoints/all-MiniLM-L6-v2")
FOLDER = Path("build/bench/cascade/checkpoints")
DEPTHS = (2, 3, 6)
EPOCHS = {"clinc150": 1, "sst2": 2}
BATCH, SEED = 32, 0
# Batches whose texts are sorted by length as one pool.
POOL = 50
HEAD_RATE, DROPOUT = 2e-3, 0.1


def rate(depth: int) -> float:
    """The peak learning rate of an encoder; fewer layers need larger changes."""
    return 1e-4 if depth > 3 else 3e-4


def checkpoint(task: str, depth: int) -> Path:
    """The folder of a fine-tuned encoder."""
    return FOLDER / f"{task}-{depth}"


def head_file(task: str, depth: int) -> Path:
    """Its linear head."""
    return FOLDER / f"{task}-{depth}-head.safetensors"


def batches(lengths: torch.Tensor) -> list[torch.Tensor]:
    """The rows of an epoch's batches, in random order; a batch holds texts of similar length, to save padding."""
    pools = torch.randperm(len(lengths)).split(BATCH * POOL)
    pooled = [batch for pool in pools for batch in pool[lengths[pool].argsort()].split(BATCH)]
    return [pooled[place] for place in torch.randperm(len(pooled)).tolist()]


class Classifier(nn.Module):
    """An encoder and a linear head over the mean of its tokens' vectors."""

    def __init__(self, depth: int, labels: int) -> None:
        from transformers import AutoModel, AutoTokenizer

        super().__init__()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(BASE)
        self.encoder: Any = AutoModel.from_pretrained(
            BASE, num_hidden_layers=depth, add_pooling_layer=False, dtype=torch.float32
        )
        self.head = nn.Linear(self.encoder.config.hidden_size, labels)

    def forward(self, texts: list[str]) -> torch.Tensor:
        """Logits [texts, labels]."""
        inputs = self._tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        pooled = (self.encoder(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.as_tensor(self.head(nn.functional.dropout(pooled, DROPOUT, self.training)))


def fine_tune(task: str, splits: Splits, depth: int) -> None:
    """Train one model and write its checkpoint."""
    torch.manual_seed(SEED)
    torch.set_flush_denormal(True)
    started = time.monotonic()
    model = Classifier(depth, len(splits.labels)).train()
    rates = [rate(depth), HEAD_RATE]
    groups = [{"params": list(part.parameters())} for part in (model.encoder, model.head)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
    texts = [text[0].decode() for text in splits.train.texts]
    lengths = torch.tensor([len(text) for text in texts])
    steps = EPOCHS[task] * len(batches(lengths))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, steps, pct_start=0.1)
    numbers = torch.from_numpy(splits.train.classes(splits.labels))
    for _ in range(EPOCHS[task]):
        for rows in batches(lengths):
            loss = nn.functional.cross_entropy(model([texts[row] for row in rows.tolist()]), numbers[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()
    record: dict[str, float] = {"seconds": round(time.monotonic() - started), "epochs": EPOCHS[task], "seed": SEED}
    record |= {name: _accuracy(model, part, splits) for name, part in (("val", splits.val), ("test", splits.test))}
    _write(model, task, splits, depth, record)
    print(f"{checkpoint(task, depth)}: {record}", flush=True)


def _write(model: Classifier, task: str, splits: Splits, depth: int, record: dict[str, float]) -> None:
    folder = checkpoint(task, depth)
    model.encoder.save_pretrained(folder)
    tensors = {name: value.detach().clone() for name, value in model.head.named_parameters()}
    save_file(tensors, head_file(task, depth), metadata={"labels": json.dumps(splits.labels)})
    shutil.copyfile(BASE / "tokenizer.json", folder / "tokenizer.json")
    (folder / "trained.json").write_text(json.dumps(record) + "\n")


def _accuracy(model: Classifier, sample: Sample, splits: Splits) -> float:
    texts = [text[0].decode() for text in sample.texts]
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    truth = sample.classes(splits.labels)
    right = 0
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            rows = order[start : start + BATCH]
            right += int(np.sum(model([texts[row] for row in rows]).argmax(1).numpy() == truth[rows]))
    return round(right / len(truth), 4)


def train_missing(task: str, splits: Splits, depths: list[int]) -> None:
    """Train the models that are missing."""
    for depth in depths:
        if not (checkpoint(task, depth) / "trained.json").is_file():
            fine_tune(task, splits, depth)


def main() -> None:
    """Train the models that are missing."""
    parser = argparse.ArgumentParser(prog="python -m bench.cascade.train", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for task in options.tasks.split(","):
        train_missing(task, read(task), [int(depth) for depth in options.depths.split(",")])


if __name__ == "__main__":
    main()
