"""The sidecar as a child process of whoever starts the server: started again if it dies, never left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import shapeshift
from shapeshift.scheduler import lock, report
from shapeshift.triton.settings import ServerSettings

LOG = "scheduler.log"
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_WELL_S = 60.0
_GRACE_S = 2.0


class SidecarProcess:
    """`shapeshift scheduler` for the server with these settings, its output in the run directory's scheduler.log.

    It ends with the process that started it, however that ends: it reads a pipe whose other side is here. A context
    manager that stops it on exit; `start` starts it.
    """

    def __init__(self, settings: ServerSettings, plan_period_s: float) -> None:
        self._run_directory = settings.run_directory
        options = {
            "--build": settings.run_directory.parent,
            "--server": f"{settings.reachable}:{settings.grpc_port}",
            "--metrics": f"http://{settings.reachable}:{settings.metrics_port}/metrics",
            "--plan-period": plan_period_s,
        }
        self._command = [sys.executable, "-P", "-m", "shapeshift.cli.main", "scheduler", "--until-eof"]
        self._command += [f"{name}={value}" for name, value in options.items()]
        self._command += [f"--repository={folder}" for folder in settings.repositories]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self._run_directory / LOG

    def start(self) -> None:
        """Start it; its log is begun anew, the last one kept beside it."""
        self._run_directory.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_name(f"{LOG}.1"))
        self._run()

    def keep(self) -> None:
        """Start it again if it has ended: at once the first time, ever later while it keeps ending."""
        if self._process is None or self._process.poll() is None:
            return
        lived = time.monotonic() - self._started_at
        if lived > _WELL_S:
            self._pause_s = _FIRST_PAUSE_S
        if lived > self._pause_s:
            self._pause_s = min(2.0 * self._pause_s, _LONGEST_PAUSE_S)
            self._release()
            self._run()

    def has_settled(self) -> bool:
        """Whether the run directory's sidecar has taken over the server: the workers of the first plan are loaded,
        or it has said why not."""
        said = report.read(self._run_directory)
        return said.get("settled") is True and said.get("pid") == lock.holder(self._run_directory)

    def last_line(self) -> str:
        """What it said last; empty for nothing."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """End it, within 3 s; safe to call again."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()
        self._process = None

    def _run(self) -> None:
        self._started_at = time.monotonic()
        paths = [str(Path(shapeshift.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal is for its parent, which then ends it.
                start_new_session=True,
            )

    def _release(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
