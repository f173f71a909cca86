"""The registry's own copies of tasks: folders in tasks_dir that are named by their hash and never change.

A task is trained in a folder of the user's, which may be trained again at any time. What is registered is a copy of it,
put in place whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shapeshift import files
from shapeshift.settings import require
from shapeshift.token_adapt.tasks import examples, registry
from shapeshift.token_adapt.tasks import folder as task_folder

_OF_TRAINING = (task_folder.TASK_FILE, task_folder.PROMPTS_FILE, task_folder.HEAD_FILE)
_OF_PROFILE = (task_folder.PROFILE_FILE, examples.FILE)


@contextmanager
def staged(tasks_dir: Path, source: Path) -> Iterator[Path]:
    """A folder in `tasks_dir` with the files that training has written to `source`; it is removed at the end.

    Raises InvalidInputError naming a file that is missing.
    """
    with _work(tasks_dir) as stage:
        for name in _OF_TRAINING:
            require((source / name).is_file(), "task folder", str(source), f"a folder that contains {name}")
            shutil.copyfile(source / name, stage / name)
        yield stage


def put(tasks_dir: Path, name: str, stage: Path) -> None:
    """Move the files of `stage` in place and register them as the task `name`. After an error nothing is registered."""
    sha256 = task_folder.sha256(stage)
    target = tasks_dir / f"task-{sha256[:12]}"
    files.flush_folder(stage)
    is_new = not target.is_dir()
    if is_new:
        stage.rename(target)
    else:
        # The same content, unless it was damaged.
        for file in list(stage.iterdir()):
            file.replace(target / file.name)
    try:
        registry.add(tasks_dir, registry.TaskEntry(name, target, sha256))
    except BaseException:
        if is_new:
            shutil.rmtree(target, ignore_errors=True)
        raise


def take(tasks_dir: Path, source: Path) -> None:
    """Register a copy of the task in `source`, with its profile. Raises InvalidInputError naming what is missing."""
    with _work(tasks_dir) as stage:
        for name in (*_OF_TRAINING, *_OF_PROFILE):
            if (source / name).is_file():
                shutil.copyfile(source / name, stage / name)
        put(tasks_dir, task_folder.check(task_folder.read_object(stage / task_folder.TASK_FILE))[0], stage)


def require_own(tasks_dir: Path, folder: Path) -> None:
    """Raise InvalidInputError for a folder that is the registry's own copy: it is to change."""
    is_copy = folder.resolve().parent == tasks_dir.resolve() and registry.COPY.fullmatch(folder.name) is not None
    require(not is_copy, "folder", str(folder), "another one: this is the registry's own copy, which never changes")


@contextmanager
def _work(tasks_dir: Path) -> Iterator[Path]:
    """An empty folder in `tasks_dir`, for what is put in place there."""
    tasks_dir.mkdir(parents=True, exist_ok=True)
    with files.draft_of(tasks_dir / "task") as stage:
        stage.mkdir()
        yield stage
