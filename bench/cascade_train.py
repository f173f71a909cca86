"""Fine-tunes the first 2, 3 and all 6 layers of all-MiniLM-L6-v2 for the tasks of `bench.cascade`.

    python -m bench.cascade_train --tasks clinc150,sst2 --depths 2,3,6

Writes sequence-classification checkpoints to build/bench/cascade/checkpoints/<task>-<depth>/, with their accuracies.
What is there already is left. Seeded; texts of like length share a batch.
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

from bench.cascade_data import TASKS, Splits, read
from shapeshift.cascade.sample import Sample

BASE = Path("build/checkpoints/all-MiniLM-L6-v2")
FOLDER = Path("build/bench/cascade/checkpoints")
DEPTHS = (2, 3, 6)
EPOCHS = {"clinc150": 2, "sst2": 1}
BATCH, SEED = 32, 0
# Batches whose texts are sorted by length together.
POOL = 50
RATE, HEAD_RATE = 3e-4, 2e-3


def checkpoint(task: str, depth: int) -> Path:
    """The folder of a fine-tuned model."""
    return FOLDER / f"{task}-{depth}"


def batches(lengths: torch.Tensor) -> list[torch.Tensor]:
    """The rows of an epoch's batches in random order; padding is spared, as each batch holds texts of like length."""
    pools = torch.randperm(len(lengths)).split(BATCH * POOL)
    found = [batch for pool in pools for batch in pool[lengths[pool].argsort()].split(BATCH)]
    return [found[place] for place in torch.randperm(len(found)).tolist()]


def fine_tune(task: str, splits: Splits, depth: int) -> None:
    """Train one model and write its checkpoint."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    names = dict(enumerate(splits.labels))
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        BASE, num_hidden_layers=depth, num_labels=len(names), id2label=names, dtype=torch.float32
    )
    # The vectors of words are good as they are, and most of the parameters.
    model.base_model.embeddings.requires_grad_(False)
    encoder = [value for value in model.base_model.parameters() if value.requires_grad]
    groups = [{"params": encoder, "lr": RATE}, {"params": model.classifier.parameters(), "lr": HEAD_RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    lengths = torch.tensor([len(text[0]) for text in splits.train.texts])
    steps = EPOCHS[task] * len(batches(lengths))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [RATE, HEAD_RATE], steps, pct_start=0.1)
    numbers = torch.from_numpy(splits.train.numbers(splits.labels))
    started = time.monotonic()
    model.train()
    for _ in range(EPOCHS[task]):
        for rows in batches(lengths):
            inputs = _batch(tokenizer, splits.train, rows.tolist())
            loss = model(**inputs, labels=numbers[rows]).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(encoder, 1.0)
            optimizer.step()
            schedule.step()
    folder = checkpoint(task, depth)
    model.eval().save_pretrained(folder)
    shutil.copyfile(BASE / "tokenizer.json", folder / "tokenizer.json")
    made: dict[str, float] = {"seconds": round(time.monotonic() - started), "epochs": EPOCHS[task], "seed": SEED}
    made |= {
        name: _accuracy(model, tokenizer, part, splits) for name, part in (("val", splits.val), ("test", splits.test))
    }
    (folder / "trained.json").write_text(json.dumps(made) + "\n")
    print(f"{folder}: {made}", flush=True)


def _batch(tokenizer: Any, sample: Sample, rows: list[int]) -> Any:
    texts = [sample.texts[row][0].decode() for row in rows]
    return tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")


def _accuracy(model: Any, tokenizer: Any, sample: Sample, splits: Splits) -> float:
    right = 0
    truth = sample.numbers(splits.labels)
    with torch.inference_mode():
        for start in range(0, len(truth), 128):
            rows = list(range(start, min(start + 128, len(truth))))
            found = model(**_batch(tokenizer, sample, rows)).logits.argmax(1).numpy()
            right += int(np.sum(found == truth[rows]))
    return round(right / len(truth), 4)


def main() -> None:
    """Train what is not there."""
    parser = argparse.ArgumentParser(prog="python -m bench.cascade_train", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for task in options.tasks.split(","):
        splits = read(task)
        for depth in map(int, options.depths.split(",")):
            if not (checkpoint(task, depth) / "trained.json").is_file():
                fine_tune(task, splits, depth)


if __name__ == "__main__":
    main()
