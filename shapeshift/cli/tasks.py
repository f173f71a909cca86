"""`shapeshift tasks`: make tasks for an image model, and add them to the registry that its server reads."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.engines.settings import GeneratedSettings
from shapeshift.errors import InvalidInputError
from shapeshift.progress import Progress
from shapeshift.token_adapt.engine_settings import ImageEngineSettings
from shapeshift.token_adapt.settings import TokenAdaptSettings
from shapeshift.triton import modelconfig


@dataclass(frozen=True)
class Served:
    """What the generated configuration of an image model says."""

    checkpoint: Path
    engines: Path
    tasks_dir: Path
    threads: int
    settings: ImageEngineSettings
    generated: GeneratedSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `shapeshift tasks`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="train|register")
    train = actions.add_parser("train", help="train prompts and heads on four fifths of the images")
    register = actions.add_parser("register", help="profile a task on the other fifth and add it to the registry")
    for one in (train, register):
        one.add_argument("folder", type=Path, help="the task's folder")
        one.add_argument("--data", type=Path, required=True, help="folder with a sub-folder of images for each label")
        one.add_argument("--model", default="classify_image", help="the front model (%(default)s)")
        one.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    train.add_argument("--name", help="the task's name (default: the folder's)")
    train.add_argument("--latency-ms", type=float, default=1000.0, help="budget of requests that state none")
    train.add_argument("--utility", type=float, default=0.5, help="utility of requests that state none")
    train.add_argument("--epochs", type=int, default=10, help="passes over the images for each gamma above 0")
    train.add_argument("--batch", type=int, default=32, help="images a step (%(default)s)")
    train.add_argument("--rate", type=float, default=0.002, help="highest learning rate (%(default)s)")
    train.add_argument("--most-images", type=int, default=0, help="images of one pass; 0: all")
    train.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """Train or register one task; progress goes to standard error."""
    served = _served(options.build / "repository" / options.model / "config.pbtxt")
    progress = Progress(options.folder.name)
    made = _train(options, served, progress) if options.action == "train" else _register(options, served, progress)
    progress.done()
    sys.stdout.write(made + "\n")
    return 0


def _served(file: Path) -> Served:
    values = modelconfig.parameters(modelconfig.read(file))
    generated = settings.read(GeneratedSettings, values)
    serving = settings.read(TokenAdaptSettings, values)
    if not generated.engines or not serving.tasks_dir:
        raise InvalidInputError("model", str(file), "an image model with engines and tasks_dir; run `make engines`")
    own = settings.read(ImageEngineSettings, values)
    stated = (own.checkpoint, generated.engines, serving.tasks_dir)
    checkpoint, engines, tasks = ((file.parent / path).resolve() for path in stated)
    return Served(checkpoint, engines, tasks, serving.threads, own, generated)


def _train(options: argparse.Namespace, served: Served, progress: Progress) -> str:
    # torch takes seconds to import.
    from shapeshift.token_adapt import examples, task_folder, task_writing, training
    from shapeshift.token_adapt.timm_weights import read_model

    rules = training.TrainSettings(options.epochs, options.batch, options.rate, options.most_images, options.seed)
    progress("read the model")
    model, _, _ = read_model(served.checkpoint)
    labels, known = examples.of_folder(options.data, model.made.image_size)
    said: dict[str, Any] = {
        "name": options.name or options.folder.resolve().name,
        "labels": list(labels),
        "backbone": served.generated.checkpoint_sha256,
        "latency_ms": options.latency_ms,
        "utility": options.utility,
    }
    task_folder.check(said)
    shown, _ = examples.split(known)
    trained = training.train(model, shown, served.settings.gamma_list(), rules, progress)
    task_writing.write_task(options.folder, said, trained)
    return f"trained: {options.folder}, {len(labels)} labels, {len(shown)} images"


def _register(options: argparse.Namespace, served: Served, progress: Progress) -> str:
    from shapeshift.token_adapt import examples, task_folder, task_registry, task_writing, vision

    progress("open the engines")
    model = vision.open_model(served.engines, served.tasks_dir, served.threads, served.generated.manifest_sha256)
    parts = task_folder.read_task(options.folder, model.backbone)
    labels, known = examples.of_folder(options.data, model.image_size)
    if labels != parts.labels:
        raise InvalidInputError(
            "data", labels, f"a sub-folder for each of the task's labels: {', '.join(parts.labels)}"
        )
    _, held = examples.split(known)
    profile = task_writing.profile(model, parts, held, progress)
    task_writing.write_object(options.folder / task_folder.PROFILE_FILE, profile)
    entry = task_registry.Entry(parts.name, options.folder.resolve(), task_folder.sha256(options.folder))
    task_registry.add(served.tasks_dir, entry)
    shares = ", ".join(f"{gamma}: {share:.3f}" for gamma, share in profile["accuracy"].items())
    return f"registered: {parts.name} in {served.tasks_dir}; accuracy by gamma {shares}"
