"""Make the demo's backbone: `python checkpoints/cifar-vit/train.py` (about an hour on one idle core).

A ViT of 1.5 million parameters, trained on CIFAR-10 from nothing. It saves its state after every epoch and goes on
from there when begun again. Same Python, torch, threads and seed: same files.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from images import CLASSES, SIZE, cifar
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from shapeshift.token_adapt.architecture import Architecture
from shapeshift.token_adapt.schedule import expand
from shapeshift.token_adapt.timm_weights import as_timm
from shapeshift.token_adapt.unified import UnifiedViT

HERE = Path(__file__).resolve().parent
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
MADE = Architecture(image_size=SIZE, patch_size=4, width=144, depth=6, heads=3, mlp_width=576, mean=MEAN, std=STD)
BATCH, EPOCHS = 250, 12
# Images are made so small until that share of the training is done: early on, fewer patches teach as much at less cost.
STAGES = ((0.69, 16), (0.89, 24), (1.0, SIZE))
# Steps of rising learning rate, and the share of the training after which it falls.
WARM_UP, FALL = 60, 0.6
MATRIX_RATE, OTHER_RATE, DECAY, SMOOTHING = 0.02, 3e-3, 0.05, 0.1
MOMENTUM, ITERATIONS = 0.95, 5
SHIFT = 4


class Classifier(nn.Module):
    """The transformer and its head over normalised images."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = UnifiedViT(MADE)
        self.head = nn.Linear(MADE.features, len(CLASSES))
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                nn.init.zeros_(part.bias)
        nn.init.trunc_normal_(self.vit.patch.weight, std=0.1)
        nn.init.trunc_normal_(self.vit.prefix, std=0.02)
        self.vit.position.data.copy_(waves(SIZE // MADE.patch_size, MADE.width))
        for block in self.vit.blocks:
            mimic(block.attention)

    def forward(self, images: torch.Tensor, side: int = SIZE) -> torch.Tensor:
        """Logits of images float [n, 32, 32, 3], made `side` wide; positions are made as many as patches."""
        if side == SIZE:
            embedded = self.vit.embed(images)
        else:
            count, size = side // MADE.patch_size, MADE.patch_size
            small = resized(images, side).view(-1, count, size, count, size, 3).permute(0, 1, 3, 2, 4, 5)
            places = resized(self.vit.position.view(1, SIZE // size, SIZE // size, MADE.width), count)
            embedded = self.vit.patch(small.reshape(len(images), count**2, 3 * size**2)) + places.flatten(1, 2)
        return self.head(self.vit.encode(embedded, expand(0, embedded.shape[1], MADE.depth)))


def resized(grid: torch.Tensor, side: int) -> torch.Tensor:
    """[n, rows, columns, channels] with `side` rows and columns."""
    moved = functional.interpolate(grid.permute(0, 3, 1, 2), size=(side, side), mode="bilinear", antialias=True)
    return moved.permute(0, 2, 3, 1).contiguous()


def waves(side: int, width: int) -> torch.Tensor:
    """Sines and cosines of both coordinates as first positions, [1, side * side, width]."""
    rates = 1 / 10000 ** (torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * rates
    axis = torch.cat((angles.sin(), angles.cos()), 1)
    rows, columns = axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)
    return torch.cat((rows, columns), 2).reshape(1, side * side, width)


def mimic(attention: nn.Module) -> None:
    """Query and key weights whose product is near the identity, value and output near its opposite.

    So they are in trained models: mimetic initialisation (Trockman and Kolter, 2023).
    """
    width, dim = MADE.width, MADE.head_width
    for head in range(MADE.heads):
        place = slice(head * dim, (head + 1) * dim)
        wanted = 0.7 * torch.randn(width, width) / math.sqrt(dim) + 0.7 * torch.eye(width)
        left, size, right = torch.linalg.svd(wanted)
        root = size[:dim].sqrt()
        attention.qkv.weight.data[:width][place] = (left[:, :dim] * root).T
        attention.qkv.weight.data[width : 2 * width][place] = right[:dim] * root[:, None]
    left, size, right = torch.linalg.svd(0.4 * torch.randn(width, width) / math.sqrt(width) - 0.4 * torch.eye(width))
    root = size.sqrt()
    attention.out.weight.data.copy_(left * root)
    attention.qkv.weight.data[2 * width :].copy_(right * root[:, None])


def vary(images: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 32, 32, 3] to normalised floats, each shifted by up to four pixels and half of them mirrored."""
    n = len(images)
    pixels = functional.pad((images.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD), (0, 0) + (SHIFT,) * 4)
    top, left = torch.randint(2 * SHIFT + 1, (2, n, 1))
    rows, columns = top + torch.arange(SIZE), left + torch.arange(SIZE)
    mirrored = torch.rand(n, 1) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    return pixels[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


class Muon(torch.optim.Optimizer):
    """Momentum whose step for each matrix is made orthogonal, in f32 (Jordan and others, 2024).

    The weight of queries, keys and values counts as three matrices.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float) -> None:
        super().__init__(matrices, {"lr": rate})

    @torch.no_grad()
    def step(self) -> None:
        """Move every matrix by the learning rate, in the spectral norm."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                mean = state.setdefault("momentum", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - MOMENTUM)
                rows = MADE.width if len(matrix) == 3 * MADE.width else len(matrix)
                parts = matrix.grad.lerp(mean, MOMENTUM).split(rows)
                step = torch.cat([orthogonal(part) * max(1, len(part) / part.shape[1]) ** 0.5 for part in parts])
                matrix.mul_(1 - group["lr"] * DECAY).sub_(step, alpha=group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix with singular values of 1, by Newton-Schulz iterations."""
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x if len(matrix) <= matrix.shape[1] else x.T


def optimisers(model: Classifier) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    matrices = [p for p in model.vit.blocks.parameters() if p.dim() == 2]
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, MATRIX_RATE),
        torch.optim.AdamW(others, lr=OTHER_RATE, weight_decay=DECAY, betas=(0.9, 0.99)),
    ]


def rate(step: int, share: float) -> float:
    """The learning rate's factor at a step: a rise, then 1, then a straight fall to nearly 0."""
    return max(0.002, min(1.0, (step + 1) / WARM_UP, (1 - share) / (1 - FALL)))


def side_at(share: float) -> int:
    """How wide images are after that share of the training."""
    return next((side for end, side in STAGES if share < end), SIZE)


@torch.no_grad()
def accuracy(model: Classifier, images: torch.Tensor, classes: torch.Tensor, side: int) -> float:
    """Share of uint8 `images` whose class comes first."""
    right = 0
    for part, wanted in zip(images.split(500), classes.split(500), strict=True):
        normal = (part.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        right += int((model(normal, side).argmax(1) == wanted).sum())
    return right / len(images)


def main() -> None:
    """Train, or go on training."""
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
    known = optimisers(model)
    begun = resume(options.work / "state.pt", model, known)
    for epoch in range(begun, options.epochs):
        one_epoch(model, known, data["train"], epoch, options.epochs)
        held = slice(0, None, 1 if epoch + 1 == options.epochs else 10)
        side = side_at((epoch + 1) / options.epochs)
        right = accuracy(model, data["test"][0][held], data["test"][1][held], side)
        print(f"epoch {epoch + 1}: test {right:.4f} of {side} pixels", flush=True)
        state = {"epoch": epoch + 1, "model": model.state_dict(), "optimisers": [one.state_dict() for one in known]}
        torch.save(state, options.work / "state.pt")
    write(model, options.to)


def write(model: Classifier, folder: Path) -> None:
    """The checkpoint as timm's format has it, in f16."""
    tensors = as_timm(model.vit) | {"head.weight": model.head.weight.detach(), "head.bias": model.head.bias.detach()}
    save_file({name: value.half().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = {
        "architecture": "vit_tiny_patch4_32",
        "num_classes": len(CLASSES),
        "num_features": MADE.width,
        "global_pool": "token",
        "model_args": {
            "img_size": SIZE,
            "patch_size": MADE.patch_size,
            "embed_dim": MADE.width,
            "depth": MADE.depth,
            "num_heads": MADE.heads,
        },
        "pretrained_cfg": {"input_size": [3, SIZE, SIZE], "mean": list(MEAN), "std": list(STD)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def resume(path: Path, model: Classifier, known: list[torch.optim.Optimizer]) -> int:
    """Take up the state at `path`, if there is one; the epochs behind it."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for one, held in zip(known, state["optimisers"], strict=True):
        one.load_state_dict(held)
    torch.manual_seed(state["epoch"])
    return int(state["epoch"])


def one_epoch(
    model: Classifier,
    known: list[torch.optim.Optimizer],
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
        for one, peak in zip(known, (MATRIX_RATE, OTHER_RATE), strict=True):
            one.param_groups[0]["lr"] = peak * rate(epoch * len(order) + step, share)
        logits = model(vary(images[chosen]), side_at(share))
        loss = functional.cross_entropy(logits, classes[chosen], label_smoothing=SMOOTHING)
        loss.backward()
        for one in known:
            one.step()
            one.zero_grad()
        total += loss.item()
        if (step + 1) % 20 == 0:
            spent = time.monotonic() - start
            print(f"epoch {epoch + 1}, step {step + 1}: {total / (step + 1):.3f} ({spent:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
