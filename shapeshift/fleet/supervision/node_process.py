"""The process of a node, `shapeshift serve --fleet`, and what its supervisor leaves for the next one, which adopts it.

The record is beside the node's fleet file, on the node's machine: also a supervisor under a new head reads it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from shapeshift import files
from shapeshift.child_process import environment
from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.triton.embedded import processes, run_record
from shapeshift.triton.embedded.run_record import Identity, Record

_PROBE_TIMEOUT_S = 2.0
LOG_FILE = "node.log"
_FILE = "node.json"


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
        try:
            with (run_directory / LOG_FILE).open("ab") as log:
                # In a session of its own, so that it outlives this process.
                self._child = subprocess.Popen(
                    self.command.arguments,
                    env=environment(),
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


@dataclass(frozen=True)
class NodeRecord:
    """command: how the node is served, or was before it was drained; is_drained: whether somebody asked for that."""

    command: NodeCommand
    is_drained: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether there is a node to take over: one that runs, or that somebody has drained."""
        return self.is_drained or NodeProcess(self.command).identity is not None


def write_record(record: NodeRecord) -> None:
    """Replace the record of the node. Raises OSError."""
    command = asdict(record.command)
    values = {"build": str(command["build"]), "options": list(command["options"]), "python": command["python"]}
    text = json.dumps({**values, "is_drained": record.is_drained})
    file = record.command.file.with_name(_FILE)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.replace_text(file, text + "\n")


def read_record(name: str, fleet_file: Path) -> NodeRecord | None:
    """The record of the node `name`, which reads `fleet_file`; None if there is none, or it is damaged."""
    try:
        values = json.loads(fleet_file.with_name(_FILE).read_text(encoding="utf-8"))
        options = tuple(map(str, values["options"]))
        command = NodeCommand(name, fleet_file, Path(values["build"]), options, str(values["python"]))
        return NodeRecord(command, bool(values["is_drained"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_record(fleet_file: Path) -> None:
    """Remove the record of the node that reads `fleet_file`. Raises OSError."""
    fleet_file.with_name(_FILE).unlink(missing_ok=True)


def kept_here(fleet_files: Iterable[tuple[str, Path]], host: str) -> list[str]:
    """The nodes of the machine `host`, this one, that are to be taken over. fleet_files: names, and what each reads."""
    names = []
    for name, file in fleet_files:
        record = read_record(name, file)
        if record is not None and record.is_kept and _host(name, file) == host:
            names.append(name)
    return names


def _host(name: str, fleet_file: Path) -> str:
    """The machine of a node, by the address that it reads of itself; empty if that is unknown."""
    try:
        nodes = settings.read(fleet_file, name).nodes
    except ShapeshiftError:
        return ""
    return next((one.grpc.host for one in nodes if one.name == name), "")
