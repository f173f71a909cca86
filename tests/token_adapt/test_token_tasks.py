"""Tasks on one set of engines: mixed batches, the registry, and invalid folders."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shapeshift.errors import EngineError
from shapeshift.token_adapt.executor import ImageModel
from shapeshift.token_adapt.model.vision_model import VisionModel, open_model
from shapeshift.token_adapt.request import Pixels, Task, Values
from tests.fakes import Request
from tests.token_adapt.token_models import LONG_MS, OUTPUTS, Gate, front
from tests.token_adapt.token_tasks import GAMMAS, noise, register, write_task
from tests.waiting import wait_for


@pytest.fixture
def root(small_project: Path, tmp_path: Path) -> Path:
    """A project with engines of three gammas and a registry of two tasks."""
    for name in ("checkpoints", "build"):
        (tmp_path / name).symlink_to(small_project / name)
    for seed, (name, labels) in enumerate((("digits", 4), ("animals", 3))):
        write_task(tmp_path, name, labels, seed)
        register(tmp_path, name)
    return tmp_path


def opened(root: Path) -> VisionModel:
    return open_model(root / "build" / "engines" / "classify_image", root / "tasks", 1)


def labelled(model: VisionModel) -> set[str]:
    return {task.name for task in model.tasks.values() if task.labels}


def test_a_batch_of_several_tasks_equals_each_task_alone(root: Path) -> None:
    model = opened(root)
    assert model.reload_tasks() == [] and labelled(model) == {"animals", "digits"}
    digits, animals = model.tasks["digits"], model.tasks["animals"]
    assert digits.accuracy == {-5: 0.45, 0: 0.5, 2: 0.52} and digits.latency_ms == 250 and digits.utility == 0.5
    pixels = noise(6)
    mixed = [digits, animals, animals, digits, animals, digits]
    served: ImageModel = model
    for gamma in GAMMAS:
        together = served.run(gamma, pixels, mixed)
        assert [len(own) for own in together] == [4, 3, 3, 4, 3, 4]
        for row in range(6):
            alone = served.run(gamma, pixels[row : row + 1], mixed[row : row + 1])[0]
            np.testing.assert_allclose(together[row], alone, atol=1e-5)
            assert together[row].dtype == np.float32 and abs(together[row].sum() - 1) < 1e-5


def test_profiles_and_shapes(root: Path) -> None:
    model = opened(root)
    assert model.preprocessing.size == 32 and model.gammas == GAMMAS
    for gamma in GAMMAS:
        assert set(model.profiles[gamma].latency_ms) == {1, 4, 16, 64} and model.profiles[gamma].memory_mb > 0


def test_the_prompts_of_a_task_change_its_answers(root: Path) -> None:
    model = opened(root)
    model.reload_tasks()
    own = model.tasks["digits"]
    parts = dataclasses.replace(own.parts, prompts=model.tasks["animals"].parts.prompts)
    pixels = noise(2)
    first, other = (np.stack(model.run(2, pixels, [one] * 2)) for one in (own, dataclasses.replace(own, parts=parts)))
    assert np.abs(first - other).max() > 1e-4


def test_requests_keep_the_version_of_their_task_when_tasks_are_added_changed_and_removed(root: Path) -> None:
    model = opened(root)
    model.reload_tasks()
    first = dict(model.tasks)
    assert model.reload_tasks() == [] and model.tasks == first
    write_task(root, "signs", 2, seed=5)
    register(root, "signs")
    assert model.reload_tasks() == [] and labelled(model) == {"animals", "digits", "signs"}
    assert all(model.tasks[name] is one for name, one in first.items())
    pixels, tasks = noise(2), [first["digits"]] * 2
    before = np.stack(model.run(2, pixels, tasks))
    write_task(root, "digits", 4, seed=9)
    register(root, "digits")
    assert model.reload_tasks() == [] and model.tasks["digits"] is not first["digits"]
    assert np.abs(np.stack(model.run(2, pixels, [model.tasks["digits"]] * 2)) - before).max() > 1e-3
    np.testing.assert_array_equal(np.stack(model.run(2, pixels, tasks)), before)
    (root / "tasks" / "registry.json").unlink()
    assert model.reload_tasks() == [] and not labelled(model)
    np.testing.assert_array_equal(np.stack(model.run(2, pixels, tasks)), before)
    # Nothing but its requests keeps an old version.
    parts = weakref.ref(first["digits"].parts)
    del first, tasks
    gc.collect()
    assert parts() is None


def test_a_waiting_image_is_answered_by_the_version_of_its_task_that_it_was_admitted_with(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, gate = opened(root), Gate()
    model.reload_tasks()
    run = model.run

    def run_later(gamma: int, pixels: Pixels, tasks: Sequence[Task]) -> Sequence[Values]:
        gate(gamma, len(pixels))
        return run(gamma, pixels, tasks)

    monkeypatch.setattr(model, "run", run_later)
    served = front(model, margin_ms=0)
    pixels, old = noise(2), model.tasks["digits"]
    first, waiting = (
        Request(OUTPUTS, {"task": "digits", "latency_ms": LONG_MS}, PIXELS=pixels[row : row + 1]) for row in range(2)
    )
    served.execute([first])
    assert gate.entered.wait(60)
    served.execute([waiting])
    # As many labels, of other names, and other weights.
    write_task(root, "digits", 4, seed=9)
    change("task.json", lambda held: held.update(labels=["w", "x", "y", "z"]))(root / "tasks" / "digits")
    register(root, "digits")
    assert model.reload_tasks() == [] and model.tasks["digits"].labels == ("w", "x", "y", "z")
    gate.opened.set()
    (gamma,) = waiting.vectors("GAMMA").ravel().tolist()
    (wanted,) = run(gamma, pixels[1:], [old])
    np.testing.assert_allclose(waiting.vectors("PROBABILITIES")[0], wanted, atol=1e-5)
    assert waiting.vectors("LABEL").item().decode() == old.labels[int(wanted.argmax())]
    version = weakref.ref(old.parts)
    del old, first, waiting
    wait_for(lambda: gc.collect() >= 0 and version() is None)
    served.close()


def change(file: str, edit: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = json.loads((folder / file).read_text())
        edit(held)
        (folder / file).write_text(json.dumps(held))

    return apply


def tensor(file: str, name: str, value: np.ndarray | None) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / file)
        held.pop(name, None)
        save_file(held if value is None else {**held, name: value}, folder / file)

    return apply


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (tensor("prompts.safetensors", "2", np.zeros((2, 3, 16), np.float32)), r"prompts.safetensors: 2.*\(2, 2, 16\)"),
    (tensor("prompts.safetensors", "2", np.zeros((2, 2, 16))), "prompts.safetensors: 2.*f32 or f16"),
    (tensor("prompts.safetensors", "2", np.full((2, 2, 16), np.nan, np.float32)), "prompts.safetensors: 2.*finite"),
    (tensor("prompts.safetensors", "2", None), "prompts.safetensors: 2.*None"),
    (tensor("head.safetensors", "0.weight", np.zeros((4, 15), np.float32)), r"head.safetensors: 0.weight.*\(4, 16\)"),
    (tensor("head.safetensors", "-5.bias", None), "head.safetensors: -5.bias"),
    (lambda folder: (folder / "head.safetensors").write_bytes(b"no tensors"), "head.safetensors.*safetensors in"),
    (lambda folder: (folder / "task.json").write_text("{"), "task.json.*JSON"),
    (lambda folder: (folder / "task.json").write_text("[]"), "task.json.*JSON object"),
    (change("task.json", lambda held: held.update(labels=["a", "a"])), "labels"),
    (change("task.json", lambda held: held.update(labels=["a", "b", "c"])), "head.safetensors"),
    (change("task.json", lambda held: held.update(labels=["a", "b", "c", "\ud800"])), "labels: got .*UTF-8"),
    (change("task.json", lambda held: held.update(latency_ms=0)), "latency_ms.*above 0"),
    (change("task.json", lambda held: held.update(utility=-1)), "utility.*0 or more"),
    (change("task.json", lambda held: held.update(utility=float("nan"))), "utility"),
    (change("task.json", lambda held: held.update(utility=True)), "utility"),
    (change("task.json", lambda held: held.update(backbone="0")), "backbone"),
    (change("task.json", lambda held: held.update(name="../digits")), "name"),
    (change("task.json", lambda held: held.update(name="other")), "name.*as in the registry"),
    (change("profile.json", lambda held: held.update(accuracy={"0": 0.5})), "accuracy of gamma -5"),
    (change("profile.json", lambda held: held.update(accuracy={"-5": 1.5})), "accuracy of gamma -5"),
]


@pytest.mark.parametrize(("breaks", "names"), BROKEN, ids=[names for _, names in BROKEN])
def test_an_invalid_folder_is_refused_and_other_tasks_are_served(
    root: Path, breaks: Callable[[Path], None], names: str
) -> None:
    model = opened(root)
    breaks(root / "tasks" / "digits")
    register(root, "digits")
    (refused,) = model.reload_tasks()
    assert refused.startswith("task digits: ")
    assert re.search(names, refused), refused
    assert labelled(model) == {"animals"}
    assert model.reload_tasks() == []


def test_a_task_survives_an_invalid_registration(root: Path) -> None:
    model = opened(root)
    model.reload_tasks()
    kept = model.tasks["digits"]
    (root / "tasks" / "digits" / "task.json").write_text("{}")
    register(root, "digits")
    assert len(model.reload_tasks()) == 1 and model.tasks["digits"] == kept


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "tasks": {}}', '{"format": 2, "entries": {"digits": 1}}'])
def test_a_broken_registry_changes_nothing(root: Path, text: str) -> None:
    model = opened(root)
    model.reload_tasks()
    (root / "tasks" / "registry.json").write_text(text)
    (message,) = model.reload_tasks()
    assert "registry.json" in message and labelled(model) == {"animals", "digits"}


def test_files_that_changed_after_registration_are_refused(root: Path) -> None:
    write_task(root, "digits", 4, seed=3)
    model = opened(root)
    (message,) = model.reload_tasks()
    assert "register the task again" in message


def test_engines_that_differ_from_their_manifest_are_refused(small_project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    shutil.copytree(small_project / "build" / "engines" / "classify_image", folder)
    (folder / "folding.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match="folding"):
        open_model(folder, tmp_path, 1)
    with pytest.raises(EngineError, match="not the one"):
        open_model(folder, tmp_path, 1, expect_sha256="0")
