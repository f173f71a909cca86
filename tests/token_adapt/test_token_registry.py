"""A model's own registry of tasks, what it takes over from the shipped one, and the commands that list and remove."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shapeshift.build_engines.image import front as images
from shapeshift.cli.main import main
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks import registry
from tests.token_adapt.token_tasks import front, paths, register, write_task


def publish(root: Path, task: str = "") -> None:
    images.publish(front(root, tasks_dir="", starter_dir="tasks", task=task), paths(root), lambda step: None)


def names(root: Path) -> list[str]:
    return [entry.name for entry in registry.read(root / "build" / "tasks" / "classify_image")]


@pytest.fixture
def shipped(project: Path) -> Path:
    """A project whose model takes over the tasks `one` and `two`; it is built."""
    for name in ("one", "two"):
        write_task(project, name, labels=3)
        register(project, name)
    publish(project)
    return project


def test_the_shipped_tasks_are_taken_over_and_their_registry_stays(shipped: Path) -> None:
    before = (shipped / "tasks" / "registry.json").read_bytes()
    assert names(shipped) == ["one", "two"]
    written = json.loads((shipped / "build" / "tasks" / "classify_image" / "registry.json").read_text())
    assert [entry["folder"] for entry in written["entries"].values()] == ["../../../tasks/one", "../../../tasks/two"]
    own = write_task(shipped, "own", labels=2)
    registry.add(
        shipped / "build" / "tasks" / "classify_image",
        registry.TaskEntry("own", own, task_folder.sha256(own)),
    )
    publish(shipped)
    assert names(shipped) == ["one", "own", "two"]
    assert (shipped / "tasks" / "registry.json").read_bytes() == before


def test_a_shipped_task_that_changed_is_taken_over_again(shipped: Path) -> None:
    changed = write_task(shipped, "one", labels=3, seed=5)
    register(shipped, "one")
    publish(shipped)
    entry = registry.read(shipped / "build" / "tasks" / "classify_image")[0]
    assert (entry.name, entry.sha256) == ("one", task_folder.sha256(changed))


def test_tasks_of_another_starter_folder_give_way(shipped: Path) -> None:
    """A front model that changes its checkpoint names other shipped tasks; those of the former one fit it no more."""
    (shipped / "former").mkdir()
    former = write_task(shipped, "former/one", labels=2)
    tasks_dir = shipped / "build" / "tasks" / "classify_image"
    registry.add(tasks_dir, registry.TaskEntry("one", former, task_folder.sha256(former)))
    publish(shipped)
    assert registry.read(tasks_dir)[0].folder.resolve() == (shipped / "tasks" / "one").resolve()


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
    register_own = registry.read(shipped / "tasks")[0]
    registry.add(shipped / "build" / "tasks" / "classify_image", register_own)
    assert names(shipped) == ["one", "two"]


def test_a_check_writes_nothing_and_names_what_is_not_there(project: Path) -> None:
    write_task(project, "one", labels=3)
    register(project, "one")
    known = front(project, tasks_dir="", starter_dir="tasks", task="one")
    images.check(known, paths(project))
    assert not (project / "build" / "tasks").exists()
    with pytest.raises(InvalidInputError, match="task: got 'two'; a registered task, or left out; registered: one"):
        images.check(front(project, tasks_dir="", starter_dir="tasks", task="two"), paths(project))
    with pytest.raises(NotFoundError, match="starter_dir: no folder .*/absent, "):
        images.check(front(project, tasks_dir="", starter_dir="absent"), paths(project))
