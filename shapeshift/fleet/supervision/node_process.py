"""The process of a node, `shapeshift serve --fleet`, which outlives its supervisor: the next one adopts it."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from shapeshift import installation
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.embedded import processes, run_record
from shapeshift.triton.embedded.run_record import Identity, Record

_PROBE_TIMEOUT_S = 2.0
LOG_FILE = "node.log"


@dataclass(frozen=True)
class NodeCommand:
    """How a node is served.

    name     of the node
    file     the fleet file that its processes watch
    build    build folder, with models and server
    options  further ones of `shapeshift serve`
    python   interpreter that has this package
    """

    name: str
    file: Path
    build: Path
    options: tuple[str, ...] = ()
    python: str = sys.executable

    @property
    def run_directory(self) -> Path:
        """Where `shapeshift serve --fleet` keeps the record of the run, the key and the logs."""
        return self.build / "nodes" / self.name / "run"

    @property
    def arguments(self) -> list[str]:
        """The command line."""
        options = [f"--fleet={self.file}", f"--node={self.name}", f"--build={self.build}"]
        return [self.python, "-P", "-m", "shapeshift.cli.main", "serve", *options, *self.options]


class NodeProcess:
    """The node of `command` on this machine: found by the record of its run, or started."""

    def __init__(self, command: NodeCommand) -> None:
        self.command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._started: Identity | None = None

    @property
    def identity(self) -> Identity | None:
        """The process that serves the node, whoever started it; None if there is none."""
        if self._child is not None:
            # What has ended must not stay a zombie.
            self._child.poll()
        for one in (self._started, record.owner if (record := self._record()) is not None else None):
            if one is not None and processes.is_alive(one):
                return one
        return None

    def is_ready(self) -> bool:
        """Whether the node's server and its models are ready."""
        record = self._record()
        if self.identity is None or record is None:
            return False
        address = str(record.about["host"]), int(record.about["ports"]["http"])
        connection = http.client.HTTPConnection(*address, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def start(self) -> Identity:
        """Start the process, unless one runs. Raises ShapeshiftError if it cannot be started."""
        if (running := self.identity) is not None:
            return running
        run_directory = self.command.run_directory
        run_directory.mkdir(parents=True, exist_ok=True)
        paths = [str(installation.IMPORT_PATH), os.environ.get("PYTHONPATH", "")]
        try:
            with (run_directory / LOG_FILE).open("ab") as log:
                # In a session of its own, so that it outlives this process.
                self._child = subprocess.Popen(
                    self.command.arguments,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise ShapeshiftError(f"node {self.command.name} cannot be started: {error}") from error
        self._started = processes.identify(self._child.pid)
        return self._started

    def terminate(self) -> None:
        """Tell the process to end its requests and stop; it may take as long as its --drain says."""
        if (running := self.identity) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once; the guard of its server stops the server."""
        if (running := self.identity) is not None:
            processes.kill(running)

    def last_line(self) -> str:
        """The last line that the process wrote, or an empty string."""
        try:
            lines = (self.command.run_directory / LOG_FILE).read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def _record(self) -> Record | None:
        return run_record.read(self.command.run_directory / "server.json")
