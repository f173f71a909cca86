"""Make the demo's backbone: `python checkpoints/cifar-vit/train.py` (about an hour on one idle core).

A ViT of 1.5 million parameters, trained on CIFAR-10 from scratch. The state is saved after every epoch; a new run
resumes from it. The same Python, torch, threads and seed give the same files.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from classifier import MADE, MEAN, STD, Classifier
from images import CLASSES, SIZE, cifar
from muon import MATRIX_RATE, OTHER_RATE, optimisers
from safetensors.torch import save_file
from torch.nn import functional

from shapeshift.token_adapt.checkpoints.weights import as_timm

HERE = Path(__file__).resolve().parent
BATCH, EPOCHS = 250, 12
# Share of the training and the width of images up to it: early on, fewer patches train as well at less cost.
STAGES = ((0.69, 16), (0.89, 24), (1.0, SIZE))
# Steps of rising learning rate, and the share of the training after which it falls.
WARM_UP, FALL = 60, 0.6
SMOOTHING = 0.1
SHIFT = 4


def augment(images: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 32, 32, 3] to normalised floats; each image is shifted by up to four pixels, half of them mirrored."""
    n = len(images)
    pixels = functional.pad((images.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD), (0, 0) + (SHIFT,) * 4)
    top, left = torch.randint(2 * SHIFT + 1, (2, n, 1))
    rows, columns = top + torch.arange(SIZE), left + torch.arange(SIZE)
    mirrored = torch.rand(n, 1) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    return pixels[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def rate(step: int, share: float) -> float:
    """The factor of the learning rate at a step: warm-up, then 1, then a linear fall to nearly 0."""
    return max(0.002, min(1.0, (step + 1) / WARM_UP, (1 - share) / (1 - FALL)))


def side_at(share: float) -> int:
    """The width of images after that share of the training."""
    return next((side for end, side in STAGES if share < end), SIZE)


@torch.no_grad()
def accuracy(model: Classifier, images: torch.Tensor, classes: torch.Tensor, side: int) -> float:
    """The share of uint8 `images` that are classified correctly."""
    right = 0
    for part, wanted in zip(images.split(500), classes.split(500), strict=True):
        normal = (part.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        right += int((model(normal, side).argmax(1) == wanted).sum())
    return right / len(images)


def main() -> None:
    """Train, or resume training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--work", type=Path, default=Path("build/cifar-vit"), help="decoded images and state")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    data = cifar(options.work / "cifar10.npz")
    model = Classifier()
    optims = optimisers(model)
    first = resume(options.work / "state.pt", model, optims)
    for epoch in range(first, options.epochs):
        one_epoch(model, optims, data["train"], epoch, options.epochs)
        held = slice(0, None, 1 if epoch + 1 == options.epochs else 10)
        side = side_at((epoch + 1) / options.epochs)
        right = accuracy(model, data["test"][0][held], data["test"][1][held], side)
        print(f"epoch {epoch + 1}: test {right:.4f} of {side} pixels", flush=True)
        state = {"epoch": epoch + 1, "model": model.state_dict(), "optimisers": [one.state_dict() for one in optims]}
        torch.save(state, options.work / "state.pt")
    write(model, options.to)


def write(model: Classifier, folder: Path) -> None:
    """Write the checkpoint in timm's format, in f16."""
    tensors = as_timm(model.vit) | {"head.weight": model.head.weight.detach(), "head.bias": model.head.bias.detach()}
    save_file({name: value.half().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = {
        "architecture": "vit_tiny_patch4_32",
        "num_classes": len(CLASSES),
        "label_names": list(CLASSES),
        "num_features": MADE.width,
        "global_pool": "token",
        "model_args": {
            "img_size": SIZE,
            "patch_size": MADE.patch_size,
            "embed_dim": MADE.width,
            "depth": MADE.depth,
            "num_heads": MADE.heads,
        },
        "pretrained_cfg": {
            "input_size": [3, SIZE, SIZE],
            "mean": list(MEAN),
            "std": list(STD),
            "crop_pct": 1.0,
            "interpolation": "bicubic",
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def resume(path: Path, model: Classifier, optims: list[torch.optim.Optimizer]) -> int:
    """Load the state at `path`, if it exists; the number of finished epochs."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for one, saved in zip(optims, state["optimisers"], strict=True):
        one.load_state_dict(saved)
    torch.manual_seed(state["epoch"])
    return int(state["epoch"])


def one_epoch(
    model: Classifier,
    optims: list[torch.optim.Optimizer],
    data: tuple[torch.Tensor, torch.Tensor],
    epoch: int,
    epochs: int,
) -> None:
    """One pass over the training images; prints loss and speed."""
    images, classes = data
    order = torch.randperm(len(images)).split(BATCH)
    start, total = time.monotonic(), 0.0
    for step, chosen in enumerate(order):
        share = (epoch + step / len(order)) / epochs
        for one, peak in zip(optims, (MATRIX_RATE, OTHER_RATE), strict=True):
            one.param_groups[0]["lr"] = peak * rate(epoch * len(order) + step, share)
        logits = model(augment(images[chosen]), side_at(share))
        loss = functional.cross_entropy(logits, classes[chosen], label_smoothing=SMOOTHING)
        loss.backward()
        for one in optims:
            one.step()
            one.zero_grad()
        total += loss.item()
        if (step + 1) % 20 == 0:
            spent = time.monotonic() - start
            print(f"epoch {epoch + 1}, step {step + 1}: {total / (step + 1):.3f} ({spent:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
