"""What a sidecar keeps in the run directory (lock, freeze switch, report, loads that it owes).

With it, the models of the repositories.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.names import worker_front

LOCK_FILE = "sidecar.lock"
FREEZE_FILE = "sidecar.freeze"
REPORT_FILE = "sidecar.json"
OWED_FILE = "sidecar.owed.json"

_LOCK_ATTEMPTS = 5
_LOCK_PAUSE_S = 0.05


@contextlib.contextmanager
def sole_sidecar(run_directory: Path) -> Iterator[None]:
    """Hold the lock of the run directory. The kernel releases it when the process ends.

    Raises ShapeshiftError at once, with the process id of the holder, if another sidecar holds it.
    """
    path = run_directory / LOCK_FILE
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ShapeshiftError(f"cannot open {path}: {error.strerror}") from error
    try:
        _acquire(lock, path)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(lock)


def lock_holder(run_directory: Path) -> int | None:
    """The id of the process that holds the lock; None if the lock is free."""
    path = run_directory / LOCK_FILE
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _written_pid(path)
        return int(pid) if pid.isdecimal() else None
    except OSError:
        return None
    return None


def is_frozen(run_directory: Path) -> bool:
    """Whether the sidecar of this run directory must change nothing."""
    return (run_directory / FREEZE_FILE).exists()


def freeze(run_directory: Path) -> None:
    """Freeze the sidecar of this run directory until `thaw`. A sidecar that starts later is frozen as well.

    Raises ShapeshiftError if the file cannot be written.
    """
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        (run_directory / FREEZE_FILE).touch()
    except OSError as error:
        raise ShapeshiftError(f"cannot write {run_directory / FREEZE_FILE}: {error.strerror}") from error


def thaw(run_directory: Path) -> None:
    """Let the sidecar make changes again. Raises ShapeshiftError if the file cannot be removed."""
    try:
        (run_directory / FREEZE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ShapeshiftError(f"cannot remove {run_directory / FREEZE_FILE}: {error.strerror}") from error


def write_report(run_directory: Path, values: dict[str, Any]) -> None:
    """Replace the report in one step. The sidecar itself never reads it. Raises OSError."""
    # Only readers use the report: the health loop does not wait for the disk.
    files.replace_text(run_directory / REPORT_FILE, json.dumps(values, indent=1) + "\n", durable=False)


def read_report(run_directory: Path) -> dict[str, Any]:
    """The last report; empty if there is none or if it is damaged."""
    try:
        values = json.loads((run_directory / REPORT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def repository_models(repositories: Iterable[Path]) -> tuple[set[str], set[str]]:
    """The models of the repositories that are not workers, and those of them that have workers."""
    names = {file.parent.name for folder in repositories for file in folder.glob("*/config.pbtxt")}
    fronts = {name: worker_front(name) for name in names}
    models = {name for name, front in fronts.items() if front not in names}
    return models, {front for front in fronts.values() if front in models}


def _acquire(lock: int, path: Path) -> None:
    # `lock_holder`, or a sidecar that is ending, holds the lock only for a moment.
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt + 1 < _LOCK_ATTEMPTS:
                time.sleep(_LOCK_PAUSE_S)
    raise ShapeshiftError(
        f"process {_written_pid(path)} is the sidecar of {path.parent}; stop it first, or use --dry-run"
    )


def _written_pid(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip() or "(starting)"
    return "(unknown)"


class OwedLoads:
    """Models that the sidecar has unloaded because their process died, until it has loaded them again. Thread-safe.

    In a file too, so that the next sidecar loads them if this one ends before. file: None for none.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._configs: dict[str, dict[str, Any]] = {}
        if file is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stored = json.loads(file.read_text())
                self._configs = {name: config for name, config in stored.items() if isinstance(config, dict)}

    def names(self) -> frozenset[str]:
        """The models that are to be loaded again."""
        with self._lock:
            return frozenset(self._configs)

    def config(self, model: str) -> dict[str, Any] | None:
        """The configuration with which `model` was loaded; None if nothing is owed."""
        with self._lock:
            return self._configs.get(model)

    def add(self, model: str, config: dict[str, Any]) -> None:
        """Remember a model before it is unloaded. Raises OSError where the file cannot be written: nothing is owed."""
        with self._lock:
            self._write({**self._configs, model: config})
            self._configs[model] = config

    def remove(self, model: str) -> None:
        """Forget a model that is loaded."""
        with self._lock:
            if self._configs.pop(model, None) is not None:
                # What stays in the file is loaded once more by the next sidecar.
                with contextlib.suppress(OSError):
                    self._write(self._configs)

    def _write(self, configs: dict[str, dict[str, Any]]) -> None:
        if self._file is not None:
            files.replace_text(self._file, json.dumps(configs, indent=1) + "\n", durable=False)
