"""Publishing the front models of a repository, one by one: a model that fails does not stop the others."""

from __future__ import annotations

import contextlib
import shutil
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from shapeshift.build_engines.build_steps import steps_of
from shapeshift.build_engines.hub.sources import remove_former
from shapeshift.build_engines.model_folder import CONFIG
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import FrontConfig, front_folders, read
from shapeshift.build_engines.text.workers import check_name
from shapeshift.engines import failures as recorded_failures
from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.progress import Progress
from shapeshift.triton.names import worker_front


def publish_all(
    names: Sequence[str],
    paths: BuildPaths,
    published: Callable[[str], None],
    failed: Callable[[str], None],
    done: Callable[[str], None] = lambda name: None,
) -> dict[str, str]:
    """Build, verify and publish the front models `names`; record the failures for `shapeshift serve`.

    published(text) takes each model's summary, failed(text) one line for each model that failed,
    done(name) each model that can be loaded. Returns the reason
    for each model of the repository whose last build failed.
    """
    others = {folder.name for folder in front_folders(paths, set())} - {*names}
    failures = {name: reason for name, reason in recorded_failures.read(paths.build).items() if name in others}
    fronts: list[FrontConfig] = []
    for name in names:
        with _record_failure(name, paths, failures, failed):
            check_name(name, {*names} | others)
            fronts.append(read(paths.repository / name))
    recorded_failures.record(paths.build, failures)
    # A front that calls other models is checked against their published engines.
    fronts.sort(key=lambda front: bool(_required(front.name, paths)))
    for front in fronts:
        with _record_failure(front.name, paths, failures, failed):
            missing = [name for name in steps_of(front).required(front, paths) if name in failures]
            if missing:
                raise NotFoundError(f"needs {', '.join(missing)}, which could not be published")
            published(publish(front, paths))
            done(front.name)
        # A build may be killed: `shapeshift serve` starts with what there is by then.
        recorded_failures.record(paths.build, failures)
    _remove_others({*names} | others, paths, published)
    remove_former(paths)
    return failures


def validate(name: str, fronts: Collection[str], paths: BuildPaths) -> Any:
    """Raise the error with which `make engines` would refuse the model `name` before it builds anything.

    fronts: the names of all front models of the repository. Returns what the check of its technique found.
    """
    check_name(name, fronts)
    front = read(paths.repository / name)
    steps = steps_of(front)
    checked = steps.check(front, paths)
    for required in steps.required(front, paths):
        if required not in fronts:
            raise NotFoundError(f"needs the model {required}: no {paths.repository / required / CONFIG}")
    return checked


def with_required(names: Sequence[str], paths: BuildPaths, said: Callable[[str], None]) -> list[str]:
    """`names`, and the models of the repository that these call; said(text) takes one line for each that is added."""
    ordered = list(names)
    for name in ordered:
        for required in _required(name, paths):
            if required not in ordered and (paths.repository / required / CONFIG).is_file():
                said(f"{name} needs {required}: building it too")
                ordered.append(required)
    return ordered


def _required(name: str, paths: BuildPaths) -> Sequence[str]:
    try:
        front = read(paths.repository / name)
        return steps_of(front).required(front, paths)
    except ShapeshiftError:
        # `publish_all` reports it.
        return ()


def _remove_others(fronts: Collection[str], paths: BuildPaths, said: Callable[[str], None]) -> None:
    """Remove the models of the generated repository that are neither one of `fronts` nor a worker of one."""
    for folder in sorted(paths.generated.iterdir()) if paths.generated.is_dir() else ():
        if folder.is_dir() and folder.name not in fronts and worker_front(folder.name) not in fronts:
            shutil.rmtree(folder)
            said(f"{folder.name}: removed, it is not in {paths.repository}")


@contextlib.contextmanager
def _record_failure(
    name: str, paths: BuildPaths, failures: dict[str, str], failed: Callable[[str], None]
) -> Iterator[None]:
    """Report an error of the model `name` in one line and add it to `failures`, so that the other models are built."""
    try:
        yield
    except ShapeshiftError as error:
        failures[name] = str(error)
    except Exception as error:  # noqa: BLE001  any error of a library concerns this model alone
        failures[name] = in_one_line(error, paths.build / f"{name}.traceback")
    if name in failures:
        failed(f"{name}: {failures[name]}")


def in_one_line(error: Exception, log: Path) -> str:
    """The type and the first line of an unexpected error. Its traceback goes to the file `log`, if writable."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    try:
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return text
    return f"{text} (traceback in {log})"


def publish(front: FrontConfig, paths: BuildPaths) -> str:
    """Build and verify what is not current, and write the model's folder. Returns its summary. Raises any error."""
    progress = Progress(front.name)
    try:
        return steps_of(front).publish(front, paths, progress)
    finally:
        progress.done()
