"""Files that break: engines that were replaced, cut off or cannot be read, and a disk without room."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.drill import models
from bench.drill.faults.scene import Fault, Scene
from bench.drill.faults.signals import WHOLE_S
from bench.drill.site import generation_raised
from shapeshift.errors import ShapeshiftError

RUN_MB = 32
_BROKEN_S = 2.0
_FULL_S = 4.0


def faults() -> Iterator[Fault]:
    """Each of them."""
    for said, break_file in (("replaced", _replace), ("truncated", _truncate), ("unreadable", _hide)):
        yield Fault(f"engine files {said}", partial(_broken_engine, break_file), WHOLE_S, holders=("encode",))
    yield Fault("disk full, and SIGKILL a front", _full_disk, WHOLE_S, holders=("encode",), held_s=_FULL_S)


def mount_run_directory(folder: Path) -> str:
    """Put a small file system at `folder`; the reason where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    unmount_run_directory(folder)
    command = ["mount", "-t", "tmpfs", "-o", f"size={RUN_MB}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip()


def unmount_run_directory(folder: Path) -> None:
    """Undo `mount_run_directory`."""
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def keep_logs(folder: Path, target: Path) -> None:
    """Copy the logs out of the run directory, which may be a file system that ends with the run."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for log in folder.glob("*.log*"):
        shutil.copy(log, target)


def _broken_engine(break_file: Callable[[Path], None], scene: Scene) -> bool:
    """A load of the broken engine must fail and leave the old one serving; the mended one must load."""
    engine = max((models.ENGINES / "encode").iterdir(), key=lambda file: file.stat().st_size)
    whole = models.FOLDER / "kept_engine"
    shutil.copyfile(engine, whole)
    with scene.site.control() as control:
        # Read first: a file that is cut off under a process that has mapped it ends that process.
        once = generation_raised(control.config("encode"))
        break_file(engine)
        try:
            control.load("encode", once)
            scene.say("the broken engine was loaded")
        except ShapeshiftError as error:
            scene.say(f"the load was refused: {str(error)[:160]}")
        finally:
            time.sleep(_BROKEN_S)
            if engine.is_dir():
                engine.rmdir()
            whole.replace(engine)
        control.load("encode", generation_raised(once))
    return False


def _replace(engine: Path) -> None:
    other = engine.with_suffix(".new")
    other.write_bytes(os.urandom(engine.stat().st_size))
    other.replace(engine)


def _truncate(engine: Path) -> None:
    """In place: a process that has mapped the file sees it."""
    os.truncate(engine, engine.stat().st_size // 2)


def _hide(engine: Path) -> None:
    """A folder in its place: permissions do not stop root."""
    engine.unlink()
    engine.mkdir()


def _full_disk(scene: Scene) -> bool | str:
    """Of the run directory, with logs, record and report: the sidecar must still heal a front."""
    folder = scene.site.settings.run_directory
    if not folder.is_mount():
        return "no small file system: mounting needs root"
    filler = folder / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError as error:
            scene.say(f"{folder}: {error.strerror}")
    os.kill(scene.site.pid("encode"), signal.SIGKILL)
    time.sleep(_FULL_S)
    filler.unlink()
    return True
