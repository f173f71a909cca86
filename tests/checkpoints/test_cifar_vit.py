"""The small image model of tests and the drill: its files, and the stated accuracies of its tasks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shapeshift.build_engines.image import front as images
from shapeshift.build_engines.image.plan import ImageFrontConfig
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.token_adapt.checkpoints.weights import read_model
from shapeshift.token_adapt.model.vision_model import open_model
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT
from shapeshift.token_adapt.tasks import examples, folder, registry, writing
from shapeshift.token_adapt.tasks.folder import Backbone
from shapeshift.triton import model_config

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "checkpoints" / "cifar-vit"
REPOSITORY, NAME = PROJECT / "tests" / "model_repository", "classify_image"
TASKS = ("animal", "cifar10", "digits")
MOST_BYTES = 8_000_000


@pytest.fixture(scope="module")
def model() -> UnifiedViT:
    return read_model(FOLDER)[0]


@pytest.fixture(scope="module")
def config() -> Any:
    """Of the front model of the tests that serves them."""
    return model_config.read(REPOSITORY / NAME / "config.pbtxt")


@pytest.fixture(scope="module")
def gammas(config: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in model_config.parameters(config)["gammas"].split(","))


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


@pytest.mark.long
def test_digits_are_classified_as_well_as_stated(config: Any, scripts: ModuleType, tmp_path: Path) -> None:
    """By engines and tasks that `make engines` makes of the front model, as it does of the demo's."""
    pytest.importorskip("sklearn")
    model_config.set_parameter(config, "gammas", "-7,0,2")
    paths = BuildPaths(PROJECT, tmp_path, REPOSITORY)
    front = images.read(REPOSITORY / NAME, config, model_config.parameters(config))
    assert isinstance(front, ImageFrontConfig)
    images.publish(front, paths, lambda step: None)
    served = open_model(paths.engines / NAME, tmp_path / "tasks" / NAME, threads=1)
    assert not served.reload_tasks() and tuple(served.tasks) == ("embedding", "classifier", *TASKS)
    _, held = examples.split(examples.from_arrays(*scripts.digits()))
    stated = folder.read_accuracy(FOLDER / "tasks" / "digits", served.gammas)
    for gamma, share in writing.accuracies(served, served.tasks["digits"], held, lambda step: None).items():
        assert abs(share - stated[gamma]) < 0.01
