"""`shapeshift tasks`: train tasks for an image model, and change the registry that its server reads."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.cli.registries import front_model
from shapeshift.engines.manifest import GeneratedSettings
from shapeshift.errors import InvalidInputError
from shapeshift.progress import Progress
from shapeshift.token_adapt.settings import ImageEngineSettings, TokenAdaptSettings
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks import registry
from shapeshift.token_adapt.tasks.examples import Examples
from shapeshift.token_adapt.tasks.folder import TASK_FILE, TaskParts


@dataclass(frozen=True)
class ImageModel:
    """Paths and settings of an image model, from its generated configuration. task: its default, if any."""

    checkpoint: Path
    engines: Path
    tasks_dir: Path
    task: str
    threads: int
    settings: ImageEngineSettings
    generated: GeneratedSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift tasks`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser("train", help="train prompts and heads on four fifths of the images")
    register = actions.add_parser("register", help="profile a task on the other fifth and add it to the registry")
    for subparser in (train, register):
        subparser.add_argument("folder", type=Path, help="the task's folder")
        subparser.add_argument(
            "--data", type=Path, required=True, help="folder with a sub-folder of images for each label"
        )
    train.add_argument("--name", help="the task's name (default: the folder's)")
    train.add_argument("--latency-ms", type=float, default=1000.0, help="latency budget of requests without one")
    train.add_argument("--utility", type=float, default=0.5, help="utility of requests without one")
    train.add_argument("--epochs", type=int, default=10, help="passes over the images for each gamma above 0")
    train.add_argument("--batch", type=int, default=32, help="images per step (%(default)s)")
    train.add_argument("--rate", type=float, default=0.002, help="highest learning rate (%(default)s)")
    train.add_argument("--most-images", type=int, default=0, help="images per pass; 0: all")
    train.add_argument("--seed", type=int, default=0)
    listing = actions.add_parser("list", help="list the registered tasks")
    listing.add_argument("--json", action="store_true", help="write one JSON object")
    remove = actions.add_parser("remove", help="remove a task from the registry")
    remove.add_argument("name")
    front_model.add_arguments(parser, (train, register, listing, remove), "classify_image")


def run(options: argparse.Namespace) -> int:
    """Run one action; progress goes to standard error. Raises ShapeshiftError."""
    image_model = _read_image_model(options)
    if options.action in ("list", "remove"):
        sys.stdout.write((_list if options.action == "list" else _remove)(options, image_model))
        return 0
    progress = Progress(options.folder.name)
    action = _train if options.action == "train" else _register
    result = action(options, image_model, progress)
    progress.done()
    sys.stdout.write(result + "\n")
    return 0


def _read_image_model(options: argparse.Namespace) -> ImageModel:
    model, values = front_model.read(options)
    generated = settings.read(GeneratedSettings, values)
    serving = settings.read(TokenAdaptSettings, values)
    if not generated.engines or not serving.tasks_dir:
        raise InvalidInputError(
            "model", options.model, "must be an image model with engines and tasks_dir; run `shapeshift engines`"
        )
    engine = settings.read(ImageEngineSettings, values)
    checkpoint, engines = ((model / path).resolve() for path in (engine.checkpoint, generated.engines))
    tasks = front_model.registry_folder(options, model, values, "tasks_dir")
    return ImageModel(checkpoint, engines, tasks, serving.task, serving.threads, engine, generated)


def _list(options: argparse.Namespace, image_model: ImageModel) -> str:
    shown: dict[str, dict[str, Any]] = {}
    for entry in registry.read(image_model.tasks_dir):
        shown[entry.name] = {"folder": str(entry.folder.resolve()), "sha256": entry.sha256}
        try:
            shown[entry.name]["labels"] = list(task_folder.check(task_folder.read_object(entry.folder / TASK_FILE))[1])
        except InvalidInputError as error:
            shown[entry.name]["problem"] = str(error)
    if options.json:
        return json.dumps(shown) + "\n"
    lines = []
    for name, about in shown.items():
        default = "default" if name == image_model.task else "-"
        said = about.get("problem") or f"{len(about['labels'])} labels"
        lines.append(f"{name:32} {default:8} {said}; {about['folder']}\n")
    return "".join(lines)


def _remove(options: argparse.Namespace, image_model: ImageModel) -> str:
    allowed = f"another task: this is the default of {options.model}; change `task` in its config.pbtxt first"
    settings.require(options.name != image_model.task, "name", options.name, allowed)
    registry.remove(image_model.tasks_dir, options.name)
    return f"{options.name}: removed; a running server applies it within two seconds\n"


def _train(options: argparse.Namespace, image_model: ImageModel, progress: Progress) -> str:
    # torch is slow to import.
    from shapeshift.token_adapt.checkpoints.reading import open_vision
    from shapeshift.token_adapt.checkpoints.weights import read_described
    from shapeshift.token_adapt.tasks import copies, examples, folder, training, writing

    copies.require_own(image_model.tasks_dir, options.folder)
    train_settings = training.TrainSettings(
        options.epochs, options.batch, options.rate, options.most_images, options.seed
    )
    progress("read the model")
    _, described = open_vision(image_model.checkpoint)
    model, _, _ = read_described(image_model.checkpoint, described)
    labels, images = examples.from_folder(options.data, described.preprocessing)
    task: dict[str, Any] = {
        "name": options.name or options.folder.resolve().name,
        "labels": list(labels),
        "backbone": image_model.generated.checkpoint_sha256,
        "latency_ms": options.latency_ms,
        "utility": options.utility,
    }
    folder.check(task)
    training_images, _ = examples.split(images)
    trained = training.train(model, training_images, image_model.settings.gamma_list(), train_settings, progress)
    writing.write_task(options.folder, task, trained)
    return f"trained: {options.folder}, {len(labels)} labels, {len(training_images)} images"


def _register(options: argparse.Namespace, image_model: ImageModel, progress: Progress) -> str:
    from shapeshift.token_adapt.model import vision_model
    from shapeshift.token_adapt.tasks import copies, examples, folder, writing

    progress("open the engines")
    tasks_dir = image_model.tasks_dir
    model = vision_model.open_model(
        image_model.engines, tasks_dir, image_model.threads, image_model.generated.manifest_sha256
    )
    # What is profiled is what is registered, also if the folder is trained again meanwhile.
    with copies.staged(tasks_dir, options.folder) as stage:
        # Above 0 engines are built for registered tasks only: it is measured there without.
        gammas = image_model.settings.gamma_list()
        parts = folder.read_task(stage, dataclasses.replace(model.backbone, gammas=gammas))
        labels, images = examples.from_folder(options.data, model.preprocessing)
        if labels != parts.labels:
            raise InvalidInputError(
                "data", labels, f"must have one sub-folder for each label of the task: {', '.join(parts.labels)}"
            )
        _, test_images = examples.split(images)
        profile = writing.profile(model, parts, test_images, progress)
        missing = [gamma for gamma in gammas if gamma not in model.gammas]
        if missing:
            profile["accuracy"] |= _accuracies(image_model, parts, test_images, missing, progress)
        writing.write_object(stage / folder.PROFILE_FILE, profile)
        examples.to_file(stage, test_images)
        copies.put(tasks_dir, parts.name, stage)
    shares = ", ".join(f"{gamma}: {share:.3f}" for gamma, share in profile["accuracy"].items())
    lines = [f"registered: {parts.name} in {tasks_dir}; accuracy by gamma {shares}"]
    if missing:
        lines.append(f"`shapeshift engines {options.model}` builds gammas {', '.join(map(str, missing))} for it")
    return "\n".join(lines)


def _accuracies(
    image_model: ImageModel, parts: TaskParts, test_images: Examples, gammas: Sequence[int], progress: Progress
) -> dict[str, float]:
    """By gamma, of the model that the engines are built from."""
    from shapeshift.token_adapt.checkpoints.reading import open_vision
    from shapeshift.token_adapt.checkpoints.weights import read_described
    from shapeshift.token_adapt.tasks import training

    progress("read the model")
    _, described = open_vision(image_model.checkpoint)
    model, _, _ = read_described(image_model.checkpoint, described)
    return {str(gamma): training.accuracy(model, test_images, gamma, parts, progress) for gamma in gammas}
