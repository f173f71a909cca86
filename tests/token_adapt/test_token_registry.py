"""A model's own registry of tasks, what it has at first, and the commands that list and remove."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shapeshift.build_engines.image import front as images
from shapeshift.cli.main import main
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks import registry
from tests.token_adapt.timm_models import small_checkpoint
from tests.token_adapt.token_tasks import front, paths, write_task


def publish(root: Path, task: str = "") -> str:
    """How the engines were made."""
    return images.publish(front(root, tasks_dir="", starter_dir="tasks", task=task), paths(root), lambda step: None)[1]


def names(root: Path) -> list[str]:
    return [entry.name for entry in registry.read(root / "build" / "tasks" / "classify_image")]


@pytest.fixture
def shipped(project: Path) -> Path:
    """A project whose model has the tasks `one` and `two` at first; it is built."""
    for name in ("one", "two"):
        write_task(project, name, labels=3)
    publish(project)
    return project


def test_the_registry_is_filled_once(shipped: Path) -> None:
    tasks_dir = shipped / "build" / "tasks" / "classify_image"
    assert names(shipped) == ["one", "two"]
    for entry in registry.read(tasks_dir):
        assert entry.folder.parent == tasks_dir and task_folder.sha256(entry.folder) == entry.sha256
    own = write_task(shipped, "own", labels=2)
    registry.add(tasks_dir, registry.TaskEntry("own", own, task_folder.sha256(own)))
    registry.remove(tasks_dir, "one")
    publish(shipped)
    assert names(shipped) == ["own", "two"]


def test_tasks_of_another_checkpoint_give_way(shipped: Path) -> None:
    small_checkpoint(shipped / "checkpoints" / "small", seed=1)
    write_task(shipped, "one", labels=2)
    shutil.rmtree(shipped / "tasks" / "two")
    aside = shipped / "build" / "tasks" / "classify_image.of_another_base"
    assert f"2 of another base model moved to {aside}" in publish(shipped)
    assert names(shipped) == ["one"] and [entry.name for entry in registry.read(aside)] == ["one", "two"]


def test_tasks_of_a_checkpoint_come_back_with_it(shipped: Path) -> None:
    tasks_dir, checkpoint = shipped / "build" / "tasks" / "classify_image", shipped / "checkpoints" / "small"
    own = write_task(shipped, "own", labels=2).rename(shipped / "own")
    registry.add(tasks_dir, registry.TaskEntry("own", own, task_folder.sha256(own)))
    small_checkpoint(checkpoint, seed=1)
    # Of a folder of starters, whose task has another name than its folder.
    shutil.rmtree(shipped / "tasks" / "two")
    write_task(shipped, "one", labels=2).rename(shipped / "tasks" / "folder")
    publish(shipped, task="one")
    assert names(shipped) == ["one"]
    small_checkpoint(checkpoint, seed=0)
    assert "back from " in publish(shipped, task="own")
    assert names(shipped) == ["one", "own", "two"]
    small_checkpoint(checkpoint, seed=1)
    publish(shipped)
    assert names(shipped) == ["one"]


def test_a_build_that_fails_moves_no_registry(shipped: Path) -> None:
    small_checkpoint(shipped / "checkpoints" / "small", seed=1)
    shutil.rmtree(shipped / "tasks" / "two")
    write_task(shipped, "one", labels=2)
    shutil.rmtree(shipped / "build" / "engines")
    (shipped / "build" / "engines").write_text("no folder")
    with pytest.raises(OSError, match="engines"):
        publish(shipped)
    assert names(shipped) == ["one", "two"]
    assert [path.name for path in (shipped / "build" / "tasks").iterdir()] == ["classify_image"]


def test_a_first_fill_that_ends_early_is_done_again(project: Path) -> None:
    for name in ("one", "two"):
        write_task(project, name, labels=3)
    head = project / "tasks" / "two" / task_folder.HEAD_FILE
    head.rename(project / "head")
    with pytest.raises(InvalidInputError):
        publish(project)
    (project / "head").rename(head)
    publish(project)
    assert names(project) == ["one", "two"]


def test_only_registered_tasks_can_be_the_default(shipped: Path) -> None:
    registry.remove(shipped / "build" / "tasks" / "classify_image", "one")
    with pytest.raises(InvalidInputError, match="task: got 'one'; a registered task, or left out; registered: two"):
        publish(shipped, task="one")


def test_tasks_are_listed_and_removed(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = ["--build", str(shipped / "build")]
    publish(shipped, task="two")
    assert main(["tasks", "list", "--json", *build]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {name: about["labels"] for name, about in listed.items()} == {
        name: [f"{name} {number}" for number in range(3)] for name in ("one", "two")
    }
    assert main(["tasks", "list", *build]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["one", "-", "3"],
        ["two", "default", "3"],
    ]
    assert main(["tasks", "remove", "one", *build]) == 0
    assert main(["tasks", "remove", "one", *build]) == 2
    assert "name: no task 'one' in " in capsys.readouterr().err
    assert main(["tasks", "remove", "two", *build]) == 2
    assert "name: got 'two'; another task: this is the default of classify_image" in capsys.readouterr().err
    publish(shipped)
    assert names(shipped) == ["two"], "a task that was removed does not come back"


def test_a_check_writes_nothing_and_names_what_is_not_there(project: Path) -> None:
    write_task(project, "one", labels=3)
    known = front(project, tasks_dir="", starter_dir="tasks", task="one")
    images.check(known, paths(project))
    assert not (project / "build" / "tasks").exists()
    with pytest.raises(InvalidInputError, match="task: got 'two'; a registered task, or left out; registered: one"):
        images.check(front(project, tasks_dir="", starter_dir="tasks", task="two"), paths(project))
    with pytest.raises(NotFoundError, match="starter_dir: no folder .*/absent, "):
        images.check(front(project, tasks_dir="", starter_dir="absent"), paths(project))
