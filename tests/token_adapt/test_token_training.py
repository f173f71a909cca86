"""Training and registering a task, from a folder of images to the registry."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shapeshift.cli import main as command
from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.checkpoints.weights import read_model
from shapeshift.token_adapt.model import vision_model
from shapeshift.token_adapt.model.manifest import Preprocessing
from shapeshift.token_adapt.model.vision_model import open_model
from shapeshift.token_adapt.tasks import copies, examples, registry, training, writing
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks.training import TrainSettings
from tests.token_adapt.timm_models import small_checkpoint
from tests.token_adapt.token_tasks import GAMMAS, backbone, register, write_task

LABELS = ("blue", "green", "red")


def coloured(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with more of one colour, which is the label."""
    drawn = np.random.default_rng(count)
    classes = np.arange(count, dtype=np.int64) % 3
    pixels = drawn.integers(0, 160, (count, 32, 32, 3))
    pixels[np.arange(count), :, :, 2 - classes] += 70
    return pixels.clip(0, 255).astype(np.uint8), classes


def folder_of_images(folder: Path, count: int) -> Path:
    pixels, classes = coloured(count)
    for index in range(count):
        own = folder / LABELS[classes[index]]
        own.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[index]).save(own / f"{index:03}.png")
    return folder


def test_a_task_is_trained_and_registered(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, task = folder_of_images(project / "data", 60), project / "tasks" / "colours"
    common = [str(task), "--data", str(data), "--build", str(project / "build")]
    assert command.main(["tasks", "train", *common, "--epochs", "2", "--utility", "0.7"]) == 0
    output = capsys.readouterr()
    assert "3 labels, 48 images" in output.out
    assert "gamma 2" in output.err and "gamma -5" in output.err
    said = json.loads((task / "task.json").read_text())
    assert said["labels"] == list(LABELS) and said["utility"] == 0.7 and said["backbone"] == backbone(project)
    readers = {file.stat().st_mode & 0o444 for file in task.iterdir()}
    assert readers == {task.stat().st_mode & 0o444}, "those who may list the folder"
    assert command.main(["tasks", "register", *common]) == 0
    (entry,) = registry.read(project / "tasks")
    profile = json.loads((entry.folder / "profile.json").read_text())
    assert profile["images"] == 12 and min(profile["accuracy"].values()) > 0.8
    model = open_model(project / "build" / "engines" / "classify_image", project / "tasks", 1)
    assert model.reload_tasks() == [] and model.tasks["colours"].accuracy[0] == profile["accuracy"]["0"]
    pixels, classes = coloured(30)
    found = [own.argmax() for own in model.run(2, pixels, [model.tasks["colours"]] * 30)]
    assert np.mean(found == classes) > 0.8
    # Where engines of gammas above 0 are yet to be built, the model that they are built from is measured.
    fewer = tuple(gamma for gamma in GAMMAS if gamma <= 0)
    model.gammas, model.backbone = fewer, dataclasses.replace(model.backbone, gammas=fewer)
    monkeypatch.setattr(vision_model, "open_model", lambda *given: model)
    assert command.main(["tasks", "register", *common]) == 0
    assert "`shapeshift engines classify_image` builds gammas 2 for it" in capsys.readouterr().out
    (entry,) = registry.read(project / "tasks")
    assert json.loads((entry.folder / "profile.json").read_text())["accuracy"] == profile["accuracy"]


def test_a_task_that_is_trained_again_is_served_as_registered(project: Path) -> None:
    data, task, tasks = folder_of_images(project / "data", 30), project / "colours", project / "tasks"
    common = [str(task), "--data", str(data), "--build", str(project / "build")]
    for action in ("train", "register"):
        assert command.main(["tasks", action, *common]) == 0
    (before,) = registry.read(tasks)
    assert before.folder.parent == tasks and before.folder.name == f"task-{before.sha256[:12]}"
    assert command.main(["tasks", "train", *common, "--epochs", "1", "--utility", "0.9"]) == 0
    model = open_model(project / "build" / "engines" / "classify_image", tasks, 1)
    assert model.reload_tasks() == [] and model.tasks["colours"].utility == 0.5
    assert command.main(["tasks", "register", *common]) == 0
    assert model.reload_tasks() == [] and model.tasks["colours"].utility == 0.9
    (after,) = registry.read(tasks)
    assert sorted(path.name for path in tasks.glob("[!.]*") if path.is_dir()) == sorted(
        [before.folder.name, after.folder.name]
    )
    assert not list(tasks.glob(".staged*")) and not list(task.glob(".training*"))


def test_copies_are_deleted_a_while_after_their_entries(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = project / "tasks"
    write_task(project, "one", 2)
    with copies.staged(tasks, tasks / "one") as stage:
        shutil.copy(tasks / "one" / "profile.json", stage)
        copies.put(tasks, "one", stage)
    (entry,) = registry.read(tasks)
    registry.remove(tasks, "one")
    assert entry.folder.is_dir(), "servers may not have read the registry since"
    register(project, "one")
    assert entry.folder.is_dir()
    monkeypatch.setattr("shapeshift.registry._KEEP_S", 0.0)
    registry.remove(tasks, "one")
    assert not entry.folder.exists() and (tasks / "one" / "task.json").is_file()


def test_the_registrys_own_copy_is_not_trained(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, tasks = folder_of_images(project / "data", 30), project / "tasks"
    copies.take(tasks, write_task(project, "one", 2))
    (entry,) = registry.read(tasks)
    options = ["--data", str(data), "--build", str(project / "build"), "--epochs", "1"]
    assert command.main(["tasks", "train", str(entry.folder), *options]) == 2
    assert "another one: this is the registry's own copy" in capsys.readouterr().err
    assert task_folder.sha256(entry.folder) == entry.sha256


def test_a_training_that_breaks_off_leaves_no_mixture(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_task(project, "one", 2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as full:
        full.setattr(writing, "save_file", fail)
        with pytest.raises(OSError, match="full"):
            write_task(project, "one", 2, seed=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with monkeypatch.context() as full:
        full.setattr(writing, "write_object", lambda file, value: fail(value, folder / "half"))
        with pytest.raises(OSError, match="full"):
            write_task(project, "one", 2, seed=1)
    assert "task.json" not in {path.name for path in folder.iterdir()}


def test_register_requires_the_trained_labels(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, task = folder_of_images(project / "data", 30), project / "colours"
    common = [str(task), "--data", str(data), "--build", str(project / "build")]
    assert command.main(["tasks", "train", *common, "--epochs", "1"]) == 0
    (data / "red").rename(data / "orange")
    assert command.main(["tasks", "register", *common]) == 2
    assert "data" in capsys.readouterr().err
    assert not (project / "tasks" / "registry.json").exists()


def test_prompts_reach_a_lower_loss_than_heads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random labels, which the frozen features cannot separate."""
    monkeypatch.setattr(training, "_HEAD_DECAYS", (1e-4,))
    small_checkpoint(tmp_path / "small")
    model, _, _ = read_model(tmp_path / "small")
    drawn = np.random.default_rng(0)
    pixels = drawn.integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    data = examples.from_arrays(pixels, drawn.integers(0, 2, 64))
    made = training.train(model, data, (0, 2), TrainSettings(epochs=40, rate=0.03), lambda step: None)
    classes = torch.from_numpy(data.classes)

    def loss(gamma: int) -> float:
        weight, bias = made.heads[gamma]
        logits = training.features(model, data, gamma, made.prompts.get(gamma)) @ weight.T + bias
        return float(torch.nn.functional.cross_entropy(logits, classes))

    assert loss(2) < 0.9 * loss(0)
    assert made.prompts[2].shape == (2, 2, 16)


def test_a_head_generalises() -> None:
    """Few rows with many features, of which one matters: without weight decay the fit would memorise them."""
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 60, generator=drawn)
    classes = (rows[:, 0] + 0.5 * torch.randn(400, generator=drawn) > 0).long()
    weight, bias = training.fit_head(rows[:100], classes[:100], 2)
    assert weight.shape == (2, 60)
    logits = rows[100:] @ weight.T + bias
    assert torch.nn.functional.cross_entropy(logits, classes[100:]) < 0.6


def test_cached_features_are_not_computed_again(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "small")
    model, _, _ = read_model(tmp_path / "small")
    data = examples.from_arrays(*coloured(30))
    asked: list[int] = []

    def plain(gamma: int) -> torch.Tensor:
        asked.append(gamma)
        return training.features(model, data, gamma, None)

    rules, gammas = TrainSettings(epochs=1), (-5, 0, 1, 3)
    made = training.train(model, data, gammas, rules, lambda step: None, plain)
    assert asked == [0, -5]
    assert {gamma: own.shape for gamma, own in made.prompts.items()} == {1: (2, 1, 16), 3: (2, 3, 16)}
    again = training.train(model, data, gammas, rules, lambda step: None)
    for gamma in gammas:
        torch.testing.assert_close(made.heads[gamma], again.heads[gamma])


def test_the_same_fifth_is_held_out_each_time() -> None:
    pixels, classes = coloured(50)
    data = examples.from_arrays(pixels, classes)
    shown, held = examples.split(data)
    again = examples.split(data)[1]
    assert len(held) == 9 and len(shown) == 41
    np.testing.assert_array_equal(held.pixels(np.arange(9)), again.pixels(np.arange(9)))
    both = np.concatenate([shown.pixels(np.arange(41)), held.pixels(np.arange(9))]).reshape(50, -1)
    assert len(np.unique(both, axis=0)) == 50
    assert set(held.classes) == {0, 1, 2}


def test_invalid_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="data"):
        examples.from_folder(tmp_path / "nowhere", Preprocessing(32))
    folder_of_images(tmp_path / "data", 30)
    (tmp_path / "data" / "none").mkdir()
    with pytest.raises(InvalidInputError, match="at least 5 images"):
        examples.from_folder(tmp_path / "data", Preprocessing(32))
    (tmp_path / "data" / "none").rmdir()
    labels, data = examples.from_folder(tmp_path / "data", Preprocessing(32))
    assert labels == LABELS and len(data) == 30
    (tmp_path / "data" / "blue" / "000.png").write_bytes(b"no image")
    with pytest.raises(InvalidInputError, match=r"000\.png"):
        data.pixels(np.arange(30))


@pytest.mark.parametrize("field", ["epochs", "batch", "rate", "most_images"])
def test_invalid_training_settings_are_refused(field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        TrainSettings(**{field: -1})
