"""A Ray cluster of several machines, all of them this one: a head, and raylets at addresses of loopback."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from shapeshift.errors import ShapeshiftError
from shapeshift.files import replace_private
from shapeshift.fleet.supervision.cluster import SETTINGS, has_started, start_ray
from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.free_ports import free_ports

HEAD = 0
_STARTS, _STOP_S = 3, 20.0
# Several machines: Ray keeps to the addresses that it is given.
_SETTINGS = {**SETTINGS, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}


class Machines:
    """Machine 0 is the head, the others are raylets. A context manager that ends all of them.

    folder: for logs and the token. cpus: of each machine but the head. Within the block, this process's environment
    has what a client of the cluster needs.
    """

    def __init__(self, folder: Path, number: int, cpus: int = 1) -> None:
        self._folder, self._number, self._cpus = folder, number, cpus
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._port = next(free_ports())
        self._variables: Mapping[str, str] = {**_SETTINGS, "RAY_AUTH_TOKEN_PATH": str((folder / "token").resolve())}
        self._before: dict[str, str | None] = {}

    @property
    def address(self) -> str:
        """HOST:PORT of the head."""
        return f"{self.host(HEAD)}:{self._port}"

    def host(self, machine: int) -> str:
        """The address of a machine."""
        # Ray replaces 127.0.0.1 by the address of a network card.
        return f"127.0.0.{2 + machine}"

    def __enter__(self) -> Self:
        replace_private(self._folder / "token", secrets.token_hex(32).encode())
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        with _undone_if_it_fails(self):
            self.start_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + _STOP_S
        for machine, process in list(self._running.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            self.kill(machine)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def start_all(self) -> None:
        """Start every machine that does not run, the head first. Raises ShapeshiftError."""
        for machine in range(self._number + 1):
            if machine not in self._running:
                self.start(machine)

    def start(self, machine: int) -> None:
        """Start Ray on a machine, and wait until it runs: again where it gives up, since the machine is busy.

        Raises ShapeshiftError.
        """
        for _ in range(_STARTS):
            if self._has_started(machine):
                return
        raise ShapeshiftError(f"Ray did not start on machine {machine}: see {self._log(machine)}")

    def _log(self, machine: int) -> Path:
        return self._folder / f"ray-{machine}.log"

    def _has_started(self, machine: int) -> bool:
        options = ["--head", f"--port={self._port}", "--include-dashboard=false", "--num-cpus=0"]
        if machine != HEAD:
            options = [f"--address={self.address}", f"--num-cpus={self._cpus}"]
        options += [f"--node-ip-address={self.host(machine)}", f"--dashboard-agent-listen-port={next(free_ports())}"]
        self._running[machine] = process = start_ray(options, self._log(machine))
        if has_started(process, self._log(machine)):
            return True
        self.kill(machine)
        return False

    def kill(self, machine: int) -> None:
        """Kill every process of Ray on a machine, with the supervisors of its nodes, as if it lost its power."""
        process = self._running.pop(machine)
        # Each of Ray's workers has a process group of its own.
        for pid in in_session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def kill_all(self) -> None:
        """Kill the whole cluster; the servers of its nodes go on."""
        for machine in list(self._running):
            self.kill(machine)


def in_session(session: int) -> list[int]:
    """The processes of a session."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    entries = (processes.look_up(pid) for pid in pids)
    return [entry.identity.pid for entry in entries if entry is not None and entry.session == session]


@contextmanager
def _undone_if_it_fails(machines: Machines) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.push(machines)
        yield
        stack.pop_all()
