"""The demo checkpoint of `classify_image`: its files, and the stated accuracies of its tasks."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.token_adapt.checkpoints.weights import read_model
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT
from shapeshift.token_adapt.tasks import examples, folder, registry, training
from shapeshift.token_adapt.tasks.folder import Backbone
from shapeshift.triton import model_config

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "checkpoints" / "cifar-vit"
TASKS = ("animal", "cifar10", "digits")
MOST_BYTES = 8_000_000


@pytest.fixture(scope="module")
def model() -> UnifiedViT:
    return read_model(FOLDER)[0]


@pytest.fixture(scope="module")
def gammas() -> tuple[int, ...]:
    """The gammas of the front model that serves it."""
    stated = model_config.parameters(
        model_config.read(PROJECT / "model_repository" / "classify_image" / "config.pbtxt")
    )
    assert (stated["checkpoint"], FOLDER.parent / stated["starter_dir"]) == (FOLDER.name, FOLDER / "tasks")
    return tuple(int(part) for part in stated["gammas"].split(","))


@pytest.fixture(scope="module")
def scripts() -> Iterator[ModuleType]:
    """The script that reads the images."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("images")
    sys.path.remove(str(FOLDER))
    del sys.modules["images"]


def test_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MOST_BYTES
    assert {path.name for path in FOLDER.iterdir()} - {"__pycache__"} == {
        *("README.md", "classifier.py", "images.py", "muon.py", "tasks.py", "train.py"),
        *("config.json", "model.safetensors", "tasks"),
    }


def test_tasks_fit_the_backbone(model: UnifiedViT, gammas: tuple[int, ...]) -> None:
    made = model.architecture
    sha256 = open_checkpoint(FOLDER, ("config.json",)).sha256
    backbone = Backbone(sha256, made.depth, made.width, made.features, gammas)
    entries = registry.read(FOLDER / "tasks")
    assert tuple(entry.name for entry in entries) == TASKS
    for entry in entries:
        assert folder.sha256(entry.folder) == entry.sha256
        assert folder.read_task(entry.folder, backbone).name == entry.name
        assert folder.read_accuracy(entry.folder, gammas)


def test_accuracies_are_those_of_the_readme(gammas: tuple[int, ...]) -> None:
    text = (FOLDER / "README.md").read_text()
    for task in TASKS:
        found = folder.read_accuracy(FOLDER / "tasks" / task, gammas)
        assert f"| {task} | " + " | ".join(f"{100 * found[gamma]:.1f}" for gamma in gammas) + " |" in text


def test_digits_are_classified_as_well_as_stated(
    model: UnifiedViT, gammas: tuple[int, ...], scripts: ModuleType
) -> None:
    pytest.importorskip("sklearn")
    _, held = examples.split(examples.from_arrays(*scripts.digits()))
    sha256 = json.loads((FOLDER / "tasks" / "digits" / "task.json").read_text())["backbone"]
    made = model.architecture
    backbone = Backbone(sha256, made.depth, made.width, made.features, gammas)
    task = folder.read_task(FOLDER / "tasks" / "digits", backbone)
    stated = folder.read_accuracy(FOLDER / "tasks" / "digits", gammas)
    for gamma in (min(gammas), 0, max(gammas)):
        prompts = torch.from_numpy(task.prompts[gamma]) if gamma > 0 else None
        logits = training.features(model, held, gamma, prompts).numpy() @ task.heads[gamma].weight.T
        found = np.mean((logits + task.heads[gamma].bias).argmax(1) == held.classes)
        assert abs(found - stated[gamma]) < 0.01
