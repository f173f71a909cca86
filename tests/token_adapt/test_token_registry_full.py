"""A registry of tasks that is full or read-only: an error of one line, and what was registered stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shapeshift import files
from shapeshift.cli.main import main
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks import registry
from tests.token_adapt.token_tasks import register, write_task

NUMBERS = [errno.ENOSPC, errno.EROFS]


@pytest.fixture
def tasks(project: Path) -> Path:
    """The registry of a built project, with the task `one`."""
    write_task(project, "one", labels=2)
    register(project, "one")
    return project / "tasks"


def fails(number: int, name: str) -> Any:
    """`files.replace_text`, which raises an error of this number for files of this name."""
    real = files.replace_text

    def replace(path: Path, text: str, durable: bool = True) -> None:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        real(path, text, durable)

    return replace


@pytest.mark.parametrize("number", NUMBERS)
def test_a_registry_that_cannot_be_written_serves_what_it_had(
    tasks: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = registry.read(tasks)
    build = str(tasks.parent / "build")
    monkeypatch.setattr(files, "replace_text", fails(number, "registry.json"))
    with pytest.raises(OSError, match=os.strerror(number)):
        registry.add(tasks, registry.TaskEntry("two", tasks / "one", "0" * 64))
    assert main(["tasks", "remove", "one", "--build", build]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"shapeshift tasks: cannot write or read {tasks / 'registry.json'}: {os.strerror(number)}"
    assert registry.read(tasks) == before


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("unwritten", ["profile.json", "registry.json"])
def test_a_task_that_is_registered_again_in_vain_is_what_it_was(
    tasks: Path, number: int, unwritten: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = registry.read(tasks)
    data = tasks.parent / "data"
    for number_of_label in range(2):
        (data / f"one {number_of_label}").mkdir(parents=True)
        for image in range(5):
            pixels = np.full((32, 32, 3), 40 * image + number_of_label, np.uint8)
            Image.fromarray(pixels).save(data / f"one {number_of_label}" / f"{image}.png")
    given = ["--data", str(data), "--build", str(tasks.parent / "build")]
    with monkeypatch.context() as full:
        full.setattr(files, "replace_text", fails(number, unwritten))
        assert main(["tasks", "register", str(tasks / "one"), *given]) == 2
    assert os.strerror(number) in capsys.readouterr().err.splitlines()[-1]
    assert registry.read(tasks) == [entry] and task_folder.sha256(entry.folder) == entry.sha256
    left = sorted(path.name for path in (tasks / "one").iterdir())
    assert left == ["head.safetensors", "profile.json", "prompts.safetensors", "task.json"]
    assert [path.name for path in tasks.iterdir() if path.is_dir()] == ["one"], "no copy is left over"
    assert main(["tasks", "register", str(tasks / "one"), *given]) == 0
    (again,) = registry.read(tasks)
    assert again.folder.parent == tasks and task_folder.sha256(again.folder) == again.sha256 != entry.sha256
