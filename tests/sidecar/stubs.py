"""Processes that look like those of Python models: by the program's name and an argument, the instance."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Stubs:
    """Starts such processes, and kills those that are left at the end."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "triton_python_backend_stub"
        self._program.symlink_to(Path(sys.executable).resolve())
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, instance: str) -> subprocess.Popen[bytes]:
        """A process of this instance of a model."""
        arguments = ["-c", "import sys, time; print(flush=True); time.sleep(600)", *"34567", instance]
        process = subprocess.Popen([self._program, *arguments], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        self._running.append(process)
        return process

    def end(self) -> None:
        """Kill all that run."""
        for process in self._running:
            process.send_signal(signal.SIGKILL)
            process.wait()


@contextmanager
def stubs_in(folder: Path) -> Iterator[Stubs]:
    started = Stubs(folder)
    try:
        yield started
    finally:
        started.end()
