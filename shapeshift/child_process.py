"""A command of this package as a child process of the command that starts the server."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from shapeshift import installation
from shapeshift.loops import Backoff

_GRACE_S = 2.0


def command_line(command: str, options: Sequence[str]) -> list[str]:
    """What starts `shapeshift COMMAND` so that it ends when its standard input does: with its parent at the latest."""
    return [sys.executable, "-P", "-m", "shapeshift.cli.main", command, "--until-eof", *options]


def add_until_eof(parser: argparse.ArgumentParser) -> None:
    """Declare `--until-eof`, with which a command calls `at_end_of_input`."""
    parser.add_argument("--until-eof", action="store_true", help="exit when standard input ends")


def at_end_of_input(act: Callable[[], object]) -> None:
    """Call `act`, on a thread of its own, when the process that holds the other end of standard input has ended."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        act()

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def environment() -> dict[str, str]:
    """The environment of this process, in which a child finds this package."""
    paths = [str(installation.IMPORT_PATH), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class ChildProcess:
    """`shapeshift COMMAND --until-eof`, with its output in `log`. variables: of its environment, beside this process's.

    It ends when its parent ends, even if the parent is killed: it reads a pipe that the parent holds open.
    A context manager that stops it on exit; `start` starts it.
    """

    def __init__(
        self,
        command: str,
        options: Sequence[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self._clock = clock
        self._command = command_line(command, options)
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._backoff = Backoff()
        self._restart_at: float | None = None
        self._is_wanted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it with a new log; the old log is kept with the ending `.1`. Does nothing if it was started before.

        One that cannot be started at present, such as without memory or processes left, counts as one that has ended.
        """
        if self._is_wanted:
            return
        with contextlib.suppress(OSError):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if self.log.exists():
                self.log.replace(self.log.with_name(f"{self.log.name}.1"))
        self._is_wanted = True
        self._try()

    def restart_if_ended(self) -> None:
        """Start it again if it has ended, after a pause that grows while it keeps ending. Raises nothing."""
        if not self._is_wanted or self.is_running:
            return
        now = self._clock()
        if self._restart_at is None:
            self._restart_at = now + self._backoff.pause(now - self._started_at)
        if now >= self._restart_at:
            self._restart_at = None
            self._close_pipe()
            self._try()

    def last_line(self) -> str:
        """The last line of the log, or an empty string."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """End it within 3 s. Safe to call again."""
        self._is_wanted = False
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close_pipe()
        self._process = None

    def _try(self) -> None:
        self._started_at = self._clock()
        self._process = None
        try:
            self._run()
        except OSError as error:
            with contextlib.suppress(OSError), self.log.open("a") as log:
                log.write(f"{self._command[4]}: could not be started: {error}; it is tried again\n")

    def _run(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment() | self._variables,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal reaches only the parent, which then stops the child.
                start_new_session=True,
            )

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
