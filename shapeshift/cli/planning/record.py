"""`shapeshift record`: what the requests of a running server ask for, as a trace without their texts."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.progress import Progress, say, warn
from shapeshift.serving import events
from shapeshift.serving.events import RingReader
from shapeshift.settings import require
from shapeshift.workloads.trace import OPTIONAL, Trace

_LOOK_S = 0.2
# For how long one look asks for records: longer than a look takes on a busy machine.
_WANTED_S = 10.0
# What arrived in time may end later.
_GRACE_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift record`."""
    parser.add_argument("model", help="the front whose requests are recorded")
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="the trace to write")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long (%(default)s)")
    parser.add_argument("--build", type=Path, default=Path("build"), help="the server's build folder (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Write the trace. 1 if requests are missing from it. Raises ShapeshiftError."""
    require_writable(options.file)
    trace, lost = record(options.build, options.model, options.seconds)
    write(trace, options.file)
    say(f"{options.file}: {len(trace)} requests of {options.model}, the last after {trace.at_s[-1]:.0f} s")
    if lost:
        warn(f"{lost} records were overwritten before they were read: the trace has a gap")
    return 1 if lost else 0


def require_writable(file: Path) -> None:
    """Raise InvalidInputError where the trace cannot be written: not after an hour of recording."""
    is_writable = os.access(file.parent, os.W_OK) and not file.is_dir()
    require(is_writable, "FILE.csv", str(file), "a file of a folder that can be written")


def record(build: Path, model: str, seconds: float) -> tuple[Trace, int]:
    """What arrives in the next seconds, or until Ctrl-C; and how many records were lost. Raises ShapeshiftError."""
    require(0 < seconds <= 86_400, "--seconds", seconds, "above 0, at most 86400")
    folder, progress = build / "run" / "events", Progress("record")
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    with Feed(folder, model) as feed:
        try:
            while (now := time.monotonic()) < start + seconds + _GRACE_S:
                rows += feed.read()
                progress(f"listening: {len(rows)} texts or images, {min(now - start, seconds):.0f} of {seconds:.0f} s")
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            seconds = min(seconds, time.monotonic() - start)
        rows += feed.read()
    progress.done()
    chosen = [row for row in sorted(rows, key=lambda row: float(row["at"])) if start <= row["at"] < start + seconds]
    if not chosen:
        raise NotFoundError(f"{model}: no request arrived and was answered in {seconds:g} s")
    columns: dict[str, Any] = {
        "at_s": np.array([row["at"] - start for row in chosen]).round(6),
        # A text that is refused for its length has none.
        "length": np.array([max(1, row["length"]) for row in chosen]),
    }
    for name, column in OPTIONAL.items():
        columns[name] = np.array([row.get(name, column.default) for row in chosen], dtype=column.kind)
    return Trace(**columns), feed.lost


def write(trace: Trace, file: Path) -> None:
    """Write the trace to the file. Raises ShapeshiftError."""
    try:
        trace.write(file)
    except OSError as error:
        raise ShapeshiftError(f"{file} cannot be written: {error.strerror}") from None


class Feed:
    """The records of a model's requests, of all its processes that there are while it is read.

    Raises NotFoundError where the model's processes record nothing.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model
        self._readers: dict[Path, RingReader] = {}
        self.lost = 0
        self._find()
        if not self._readers:
            served = sorted({events.model_of(file) for file in folder.glob(f"*{events.SUFFIX}")})
            hint = f"those that do: {', '.join(served)}" if served else "is there a server of `shapeshift serve`?"
            raise NotFoundError(f"no process of a model {model} records in {folder}; {hint}")
        # What ended before.
        self.read()
        self.lost = 0

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()

    def read(self) -> list[dict[str, Any]]:
        """What was recorded since the last call; the processes go on."""
        self._find()
        rows: list[dict[str, Any]] = []
        for reader in self._readers.values():
            before = reader.lost
            for event in reader.read():
                # A list that is too long for a record is its length.
                if event.kind == "requests" and isinstance(event.values["rows"], list):
                    rows += event.values["rows"]
            self.lost += reader.lost - before
        return rows

    def _find(self) -> None:
        for file in self._folder.glob(f"{self._model}.*{events.SUFFIX}"):
            with contextlib.suppress(OSError, ValueError):
                if events.model_of(file) == self._model and events.is_written(file):
                    if file not in self._readers:
                        self._readers[file] = RingReader(file)
                    self._readers[file].want_requests(_WANTED_S)
