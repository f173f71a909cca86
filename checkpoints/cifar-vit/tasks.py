"""Make the demo's tasks over its backbone: `python checkpoints/cifar-vit/tasks.py` (some ten minutes on one core).

cifar10 (10 classes), animal (or vehicle) and digits (scikit-learn's). The first two are trained on training images of
CIFAR-10 and profiled on its test images, which the backbone has not been trained on; the last is trained on four fifths
of the digits and profiled on the rest. Existing tasks are kept.
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
from shapeshift.token_adapt.checkpoints.weights import read_model
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT
from shapeshift.token_adapt.tasks import examples, registry, training, writing
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks.examples import Examples
from shapeshift.token_adapt.tasks.training import TrainedTask, TrainSettings

HERE = Path(__file__).resolve().parent
# The paper's gammas for 196 patches and 12 layers, scaled to 64 patches and 6 layers.
GAMMAS = (-13, -10, -7, -3, 0, 1, 2, 4)
ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
DEFAULTS = {"cifar10": (500.0, 1.0), "animal": (300.0, 0.3), "digits": (1000.0, 0.6)}


def main() -> None:
    """Train, profile and register the missing tasks."""
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
    plain = PlainFeatures(model)
    for name, labels, shown, held, settings in all_tasks(options):
        folder = options.to / name
        if name not in options.only.split(",") or (folder / task_folder.PROFILE_FILE).is_file():
            continue
        progress, start_s = partial(print_progress, name, time.monotonic()), time.process_time()
        made = training.train(model, shown, GAMMAS, settings, progress, partial(plain, shown))
        latency_ms, utility = DEFAULTS[name]
        said = {"name": name, "labels": list(labels), "backbone": sha256, "latency_ms": latency_ms, "utility": utility}
        writing.write_task(folder, said, made)
        found = {str(gamma): round(accuracy(model, plain, made, gamma, held), 4) for gamma in GAMMAS}
        command = "python checkpoints/cifar-vit/tasks.py, eager model"
        profile = {"accuracy": found, "images": len(held), "trained_on": len(shown), "command": command}
        writing.write_object(folder / task_folder.PROFILE_FILE, profile)
        if name == "digits":
            # The licence of the digits (CC BY 4.0) allows copies; CIFAR-10 has none.
            examples.to_file(folder, held)
        registry.add(options.to, registry.TaskEntry(name, folder, task_folder.sha256(folder)))
        shares = " | ".join(f"{100 * share:.1f}" for share in found.values())
        progress(f"done in {time.process_time() - start_s:.0f} s of processor time\n| {name} | {shares} |")


class PlainFeatures:
    """Features at gammas up to 0, computed once for tasks of the same images."""

    def __init__(self, model: UnifiedViT) -> None:
        self._model = model
        self._cache: dict[tuple[object, int], torch.Tensor] = {}

    def __call__(self, images: Examples, gamma: int) -> torch.Tensor:
        key = images.pixels, gamma
        if key not in self._cache:
            self._cache[key] = training.features(self._model, images, gamma, None)
        return self._cache[key]


def all_tasks(options: argparse.Namespace) -> list[tuple[str, tuple[str, ...], Examples, Examples, TrainSettings]]:
    """Every task: its name, labels, training images, profiling images, and training settings."""
    data = cifar(options.work / "cifar10.npz")
    parts = {part: examples.from_arrays(images.numpy(), classes.numpy()) for part, (images, classes) in data.items()}
    rng = np.random.default_rng(0)
    shown = parts["train"].subset(rng.permutation(len(parts["train"]))[: options.shown])
    held = parts["test"].subset(rng.permutation(len(parts["test"]))[: options.profiled])
    vehicle = np.array([name not in ANIMALS for name in CLASSES], dtype=np.int64)
    figures = examples.split(examples.from_arrays(*digits()))
    few = TrainSettings(epochs=options.epochs, batch=50, rate=0.003)
    many = TrainSettings(epochs=2 * options.epochs, batch=50, rate=0.003)
    return [
        ("cifar10", CLASSES, shown, held, few),
        ("animal", ("animal", "vehicle"), *(Examples(vehicle[one.classes], one.pixels) for one in (shown, held)), few),
        ("digits", tuple("0123456789"), *figures, many),
    ]


def accuracy(model: UnifiedViT, plain: PlainFeatures, made: TrainedTask, gamma: int, held: Examples) -> float:
    """The share of `held` that the task classifies correctly."""
    weight, bias = made.heads[gamma]
    features = plain(held, gamma) if gamma <= 0 else training.features(model, held, gamma, made.prompts[gamma])
    return float(((features @ weight.T + bias).argmax(1).numpy() == held.classes).mean())


def print_progress(name: str, start_s: float, step: str) -> None:
    """Print a step with the time since the start."""
    print(f"{name}, {time.monotonic() - start_s:.0f} s: {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
