"""Trains the linear heads of the intents demo: mean-pooled vectors of all-MiniLM-L6-v2's layers 2 and 6, frozen.

    python checkpoints/clinc150-minilm/train.py --data data_full.json

The data is data_full.json of clinc/oos-eval. Writes head-2.safetensors and head-6.safetensors (f16) beside itself, and
val.jsonl and test.jsonl, samples for `shapeshift cascade register`, into build/clinc150/; prints the accuracies.
Seeded; a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

HERE = Path(__file__).resolve().parent
LAYERS = (2, 6)
SEED = 0
EPOCHS = 60
BATCH = 256
RATE = 3e-3
DECAY = 2e-3
# The least standard deviation by which a component is scaled, as a share of the components' median.
LEAST_SPREAD = 0.1


def features(texts: list[str], checkpoint: Path, batch: int = 64) -> dict[int, torch.Tensor]:
    """The mean-pooled vectors [texts, 384] of each of LAYERS."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModel.from_pretrained(checkpoint).eval()
    order = np.argsort([len(text) for text in texts])
    found = {layer: torch.zeros(len(texts), model.config.hidden_size) for layer in LAYERS}
    for start in range(0, len(texts), batch):
        places = order[start : start + batch]
        inputs = tokenizer([texts[place] for place in places], padding=True, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        with torch.inference_mode():
            hidden = model(**inputs, output_hidden_states=True).hidden_states
        for layer in LAYERS:
            found[layer][torch.from_numpy(places)] = (hidden[layer] * mask).sum(1) / mask.sum(1)
    return found


def train(vectors: torch.Tensor, labels: torch.Tensor, classes: int) -> nn.Linear:
    """A linear classifier, trained by AdamW and rounded to its stored precision.

    Inputs are scaled to unit variance during training; the scaling is then folded into the weights.
    """
    torch.manual_seed(SEED)
    mean, spread = vectors.mean(0), vectors.std(0)
    spread = spread.clamp(min=LEAST_SPREAD * float(spread.median()))
    scaled = (vectors - mean) / spread
    head = nn.Linear(vectors.shape[1], classes)
    steps = EPOCHS * -(-len(vectors) // BATCH)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(vectors)).split(BATCH):
            loss = nn.functional.cross_entropy(head(scaled[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        head.weight /= spread
        head.bias -= head.weight @ mean
    return head.half().float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="data_full.json of clinc/oos-eval")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/checkpoints/all-MiniLM-L6-v2"))
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--samples", type=Path, default=Path("build/clinc150"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data: dict[str, Any] = json.loads(options.data.read_text(encoding="utf-8"))
    names = sorted({label for _, label in data["train"]})
    numbers = {name: number for number, name in enumerate(names)}
    splits = ("train", "val", "test")
    texts = [text for split in splits for text, _ in data[split]]
    labels = torch.tensor([numbers[label] for split in splits for _, label in data[split]])
    parts = dict(zip(splits, torch.arange(len(texts)).split([len(data[split]) for split in splits]), strict=True))
    found = features(texts, options.checkpoint)
    for layer in LAYERS:
        head = train(found[layer][parts["train"]], labels[parts["train"]], len(names))
        tensors = {name: value.detach().half().numpy() for name, value in head.named_parameters()}
        save_file(tensors, options.to / f"head-{layer}.safetensors", metadata={"labels": json.dumps(names)})
        with torch.inference_mode():
            right = {
                split: float((head(found[layer][rows]).argmax(1) == labels[rows]).float().mean())
                for split, rows in parts.items()
            }
        print(f"layer {layer}: " + ", ".join(f"{split} {100 * share:.2f}%" for split, share in right.items()))
    options.samples.mkdir(parents=True, exist_ok=True)
    for split in ("val", "test"):
        lines = [json.dumps({"text": text, "label": label}) for text, label in data[split]]
        (options.samples / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
