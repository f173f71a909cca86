"""The tasks of `classify_image`: they fit its encoder and its gammas, and their accuracies are those of the README."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shapeshift.build_engines.hub.sources import find_checkpoint
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.token_adapt.checkpoints.reading import open_vision
from shapeshift.token_adapt.checkpoints.weights import read_described
from shapeshift.token_adapt.tasks import examples, folder, training
from shapeshift.token_adapt.tasks.folder import Backbone
from shapeshift.triton import model_config
from tests.conftest import BUILD, PROJECT

FOLDER = PROJECT / "checkpoints" / "dinov2-small-tasks"
TASKS = ("animal", "cifar10", "digits")
MOST_BYTES = 500_000


@pytest.fixture(scope="module")
def parameters() -> dict[str, str]:
    """Of the front model that serves them."""
    return model_config.parameters(model_config.read(PROJECT / "model_repository" / "classify_image" / "config.pbtxt"))


@pytest.fixture(scope="module")
def gammas(parameters: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(gamma) for gamma in parameters["gammas"].split(","))


@pytest.fixture(scope="module")
def encoder(parameters: dict[str, str]) -> Path:
    """The folder of the encoder's checkpoint."""
    if not (BUILD / "checkpoints" / parameters["checkpoint"]).is_dir():
        pytest.skip(f"no {BUILD / 'checkpoints' / parameters['checkpoint']}: run `make setup`")
    return find_checkpoint(parameters["checkpoint"], BuildPaths(PROJECT, BUILD, PROJECT / "model_repository")).folder


def test_small(parameters: dict[str, str]) -> None:
    assert FOLDER.parent / parameters["starter_dir"] == FOLDER
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MOST_BYTES


def test_tasks_fit_the_encoder(encoder: Path, gammas: tuple[int, ...]) -> None:
    checkpoint, described = open_vision(encoder)
    sizes = described.architecture
    backbone = Backbone(checkpoint.sha256, sizes.depth, sizes.width, sizes.features, gammas)
    for task in TASKS:
        assert folder.read_task(FOLDER / task, backbone).name == task


def test_accuracies_are_those_of_the_readme(gammas: tuple[int, ...]) -> None:
    text = (FOLDER / "README.md").read_text()
    for task in TASKS:
        profile = folder.read_object(FOLDER / task / "profile.json")
        assert set(folder.read_accuracy(FOLDER / task, gammas)) == set(gammas)
        shares = " | ".join(f"{100 * share:.1f}" for share in profile["accuracy"].values())
        assert f"| {task} | {profile['trained_on']} | {profile['images']} | {shares} |" in text


def test_digits_are_classified_as_stated(
    encoder: Path, gammas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 digits that trained nothing, nearly as many as stated have the right label, with most merged."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(PROJECT / "checkpoints" / "cifar-vit"))
    pixels, classes = importlib.import_module("images").digits()
    monkeypatch.delitem(sys.modules, "images")
    checkpoint, described = open_vision(encoder)
    sizes, gamma = described.architecture, min(gammas)
    held = examples.split(examples.from_arrays(pixels, classes))[1].subset(np.arange(0, 360, 30))
    square = (sizes.image_size, sizes.image_size)
    large = [Image.fromarray(one).resize(square, Image.Resampling.BICUBIC) for one in held.pixels(np.arange(12))]
    held = examples.from_arrays(np.stack([np.asarray(one) for one in large]), held.classes)
    model = read_described(encoder, described)[0]
    computed = training.features(model, held, gamma, None).numpy()
    backbone = Backbone(checkpoint.sha256, sizes.depth, sizes.width, sizes.features, gammas)
    head = folder.read_task(FOLDER / "digits", backbone).heads[gamma]
    assert ((computed @ head.weight.T + head.bias).argmax(1) == held.classes).sum() >= 10
