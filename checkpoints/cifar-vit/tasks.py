"""Make the demo's tasks over its backbone: `python checkpoints/cifar-vit/tasks.py` (some ten minutes on one core).

cifar10 (10 classes), animal (or vehicle) and digits (scikit-learn's). The first two are trained on training images of
CIFAR-10 and profiled on test images, which the backbone has not seen either; the last is trained on four fifths of
the digits and profiled on one. A task that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from images import CLASSES, cifar, digits

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.token_adapt import examples, task_folder, task_registry, task_writing, training
from shapeshift.token_adapt.examples import Examples
from shapeshift.token_adapt.timm_weights import read_model
from shapeshift.token_adapt.training import Trained, TrainSettings
from shapeshift.token_adapt.unified import UnifiedViT

HERE = Path(__file__).resolve().parent
# The paper's gammas for 196 patches and 12 layers, scaled to 64 patches and 6 layers.
GAMMAS = (-13, -10, -7, -3, 0, 1, 2, 4)
ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
DEFAULTS = {"cifar10": (500.0, 1.0), "animal": (300.0, 0.3), "digits": (1000.0, 0.6)}


def main() -> None:
    """Train, profile and register what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", type=Path, default=HERE)
    parser.add_argument("--to", type=Path, default=HERE / "tasks")
    parser.add_argument("--work", type=Path, default=Path("build/cifar-vit"), help="decoded images")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default=",".join(DEFAULTS), help="some of %(default)s")
    parser.add_argument("--shown", type=int, default=4000, help="training images of CIFAR-10 (%(default)s)")
    parser.add_argument("--profiled", type=int, default=2000, help="its test images (%(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over them; twice as many over the digits")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, _, _ = read_model(options.backbone)
    sha256 = open_checkpoint(options.backbone, ("config.json",)).sha256
    plain = Plain(model)
    for name, labels, shown, held, settings in known(options):
        folder = options.to / name
        if name not in options.only.split(",") or (folder / task_folder.PROFILE_FILE).is_file():
            continue
        told, begun = partial(tell, name, time.monotonic()), time.process_time()
        made = training.train(model, shown, GAMMAS, settings, told, partial(plain, shown))
        latency_ms, utility = DEFAULTS[name]
        said = {"name": name, "labels": list(labels), "backbone": sha256, "latency_ms": latency_ms, "utility": utility}
        task_writing.write_task(folder, said, made)
        found = {str(gamma): round(accuracy(model, plain, made, gamma, held), 4) for gamma in GAMMAS}
        command = "python checkpoints/cifar-vit/tasks.py, eager model"
        profile = {"accuracy": found, "images": len(held), "trained_on": len(shown), "command": command}
        task_writing.write_object(folder / task_folder.PROFILE_FILE, profile)
        task_registry.add(options.to, task_registry.Entry(name, folder, task_folder.sha256(folder)))
        shares = " | ".join(f"{100 * share:.1f}" for share in found.values())
        told(f"done in {time.process_time() - begun:.0f} s of processor time\n| {name} | {shares} |")


class Plain:
    """Features at gammas up to 0, computed once for tasks of the same images."""

    def __init__(self, model: UnifiedViT) -> None:
        self._model = model
        self._found: dict[tuple[object, int], torch.Tensor] = {}

    def __call__(self, images: Examples, gamma: int) -> torch.Tensor:
        key = images.pixels, gamma
        if key not in self._found:
            self._found[key] = training.features(self._model, images, gamma, None)
        return self._found[key]


def known(options: argparse.Namespace) -> list[tuple[str, tuple[str, ...], Examples, Examples, TrainSettings]]:
    """Every task's name, labels, images to train on and to profile with, and how its prompts are trained."""
    data = cifar(options.work / "cifar10.npz")
    parts = {part: examples.of_arrays(images.numpy(), classes.numpy()) for part, (images, classes) in data.items()}
    drawn = np.random.default_rng(0)
    shown = parts["train"].part(drawn.permutation(len(parts["train"]))[: options.shown])
    held = parts["test"].part(drawn.permutation(len(parts["test"]))[: options.profiled])
    vehicle = np.array([name not in ANIMALS for name in CLASSES], dtype=np.int64)
    figures = examples.split(examples.of_arrays(*digits()))
    few = TrainSettings(epochs=options.epochs, batch=50, rate=0.003)
    many = TrainSettings(epochs=2 * options.epochs, batch=50, rate=0.003)
    return [
        ("cifar10", CLASSES, shown, held, few),
        ("animal", ("animal", "vehicle"), *(Examples(vehicle[one.classes], one.pixels) for one in (shown, held)), few),
        ("digits", tuple("0123456789"), *figures, many),
    ]


def accuracy(model: UnifiedViT, plain: Plain, made: Trained, gamma: int, held: Examples) -> float:
    """Share of `held` whose label comes first."""
    weight, bias = made.heads[gamma]
    known = plain(held, gamma) if gamma <= 0 else training.features(model, held, gamma, made.prompts[gamma])
    return float(((known @ weight.T + bias).argmax(1).numpy() == held.classes).mean())


def tell(name: str, begun: float, step: str) -> None:
    """Progress."""
    print(f"{name}, {time.monotonic() - begun:.0f} s: {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
