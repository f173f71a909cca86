"""Starts and stops one tritonserver; there is one for each run directory.

settings = ServerSettings(repositories=(Path("build/repository"),), models=("encode",))
with TritonServer(settings) as server:
    server.wait_ready()
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from shapeshift.errors import ShapeshiftError
from shapeshift.triton import keys
from shapeshift.triton.embedded import command_line, guard, logs, processes, run_record
from shapeshift.triton.settings import ServerSettings

__all__ = ["ServerEndedError", "ServerSettings", "TritonServer", "clean_up", "exclusive_use"]

_EXTRA_GRACE_S = 1.0
_KILL_S = 1.5
_LAUNCH_TIMEOUT_S = 120.0
_LOCK_TIMEOUT_S = 10.0


@contextlib.contextmanager
def exclusive_use(run_directory: Path, record_file: Path) -> Iterator[int]:
    """Hold the lock of the run directory, after cleaning up what earlier runs left.

    Yields the file descriptor of the lock; a child process that inherits it keeps the lock until it ends. Waits up
    to 10 s for a server whose owner has ended. Raises ShapeshiftError at once if its owner is running.
    """
    lock = os.open(run_directory / "server.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _acquire(lock, run_directory, record_file)
        clean_up(record_file)
        yield lock
    finally:
        os.close(lock)


def clean_up(record_file: Path) -> None:
    """End the processes of the recorded run and delete its record. The caller must hold the lock."""
    if (record := run_record.read(record_file)) is not None:
        processes.stop(record, grace_s=0.0)
    record_file.unlink(missing_ok=True)


def _acquire(lock: int, run_directory: Path, record_file: Path) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            present = run_record.read(record_file)
        if present is not None and processes.is_alive(present.owner):
            raise ShapeshiftError(
                f"a server of {run_directory} is running (started by process {present.owner.pid}); stop it,"
                " or use another build folder"
            )
        if time.monotonic() > deadline:
            raise ShapeshiftError(f"another start holds {run_directory}/server.lock; try again later")
        time.sleep(0.05)


class ServerEndedError(ShapeshiftError):
    """The server ended by itself."""


class TritonServer:
    """One server and its guard process. A context manager that starts the server on entry and stops it on exit.

    If this program ends without `stop`, even if it is killed, the guard stops the server. key: for the restricted
    interfaces; empty until the first start.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.key = ""
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """The pid of tritonserver, also after it has ended."""
        if self._pid is None:
            raise ShapeshiftError("the server was not started; call start() first")
        return self._pid

    @property
    def http_url(self) -> str:
        """HOST:PORT for HTTP clients."""
        return f"{self.settings.reachable}:{self.settings.http_port}"

    @property
    def grpc_url(self) -> str:
        """HOST:PORT for gRPC clients."""
        return self.settings.grpc_url

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics page."""
        return self.settings.metrics_url

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> Self:
        """Start the server, after cleaning up what an earlier run in the same run directory left.

        Returns before any model is loaded. The log is new; the old log is kept with the ending `.1`. Raises
        ShapeshiftError if the run directory or a port is in use, or if a required file is missing.
        """
        if self._guard is not None:
            raise ShapeshiftError("the server was already started; stop() it first")
        settings = self.settings
        command_line.require_models(settings)
        command_line.require_matching_environment(settings.triton)
        for folder in (settings.run_directory, settings.log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with exclusive_use(settings.run_directory, settings.record) as lock:
            local = {name: port for name, port in settings.ports.items() if name != "grpc"}
            command_line.require_free_ports(settings.address, local)
            command_line.require_free_ports(settings.grpc_address, {"grpc": settings.grpc_port})
            order = self._order()
            if settings.log.exists():
                settings.log.replace(settings.log.with_name(f"{settings.log.name}.1"))
            with settings.log.open("ab") as log:
                self._guard = subprocess.Popen(
                    [sys.executable, "-P", "-m", guard.__name__],
                    env={**os.environ, "PYTHONPATH": order.environment["PYTHONPATH"]},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        try:
            self._launch(order)
        except BaseException:
            self.stop()
            raise
        return self

    def poll_ready(self) -> bool:
        """Whether the server, all loaded models and the metrics port, which opens last, are ready.

        Raises ServerEndedError if the server has ended.
        """
        self.require_running()
        return self._answers(self.settings.http_port, "/v2/health/ready") and self._answers(
            self.settings.metrics_port, "/metrics"
        )

    def failed_models(self) -> dict[str, str]:
        """The models of the settings that did not load, with the server's reason; asked once the server is ready.

        Empty where the server does not answer.
        """
        entries = self._index()
        states = {name: [entry for entry in entries if entry["name"] == name] for name in self.settings.models}
        return {
            name: _first_line([entry.get("reason", "") for entry in states[name]])
            for name in (self.settings.models if entries else ())
            if all(entry.get("state") != "READY" for entry in states[name])
        }

    def ready_models(self) -> set[str]:
        """The models that are loaded; none where the server does not answer."""
        return {entry["name"] for entry in self._index() if entry.get("state") == "READY"}

    def _index(self) -> list[dict[str, str]]:
        connection = http.client.HTTPConnection(self.settings.reachable, self.settings.http_port, timeout=5.0)
        try:
            connection.request("POST", "/v2/repository/index", body="{}", headers={keys.HTTP_HEADER: self.key})
            answer = json.loads(connection.getresponse().read())
            return answer if isinstance(answer, list) else []
        except (OSError, ValueError, http.client.HTTPException):
            return []
        finally:
            connection.close()

    def wait_ready(self, timeout_s: float = 600.0) -> Self:
        """Wait until `poll_ready`. Raises ShapeshiftError with the errors of the log after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.poll_ready():
            if time.monotonic() > deadline:
                raise self.failure(f"was not ready after {timeout_s:g} s")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """Stop the server and all processes that it started, within 10 s. Safe to call again."""
        if self._guard is None:
            return
        self._guard.terminate()
        self._guard.send_signal(signal.SIGCONT)
        try:
            self._guard.wait(timeout=self._grace_s + _KILL_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        record = run_record.read(self.settings.record)
        if record is not None and record.guard.pid == self._guard.pid:
            clean_up(self.settings.record)
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._guard = None

    def require_running(self) -> None:
        """Raise ServerEndedError, with exit status and the last errors of the log, unless the server is running."""
        if not self.is_running:
            raise ServerEndedError(self._report(self._describe_end()))

    def failure(self, what: str) -> ShapeshiftError:
        """An error with `what` happened to the server and the last errors of its log."""
        return ShapeshiftError(self._report(what))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _grace_s(self) -> float:
        return command_line.EXIT_TIMEOUT_S + _EXTRA_GRACE_S

    def _order(self) -> guard.LaunchOrder:
        settings = self.settings
        self.key = keys.ensure_key(settings.key_file)
        prefix = run_record.new_prefix()
        environment = command_line.environment(settings)
        return guard.LaunchOrder(
            command=command_line.command(settings, environment, self.key, prefix),
            environment=environment,
            log=str(settings.log.resolve()),
            record=str(settings.record.resolve()),
            prefix=prefix,
            owner=os.getpid(),
            grace_s=self._grace_s,
            about={
                "host": settings.address,
                "grpc_host": settings.grpc_address,
                "ports": settings.ports,
                "models": list(settings.models),
            },
        )

    def _launch(self, order: guard.LaunchOrder) -> None:
        assert self._guard is not None and self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(guard.encode(order))
            self._guard.stdin.close()
        answer = self._read_line(_LAUNCH_TIMEOUT_S)
        if "pid" not in answer:
            raise self.failure("did not start")
        self._pid, self._status = answer["pid"], None

    def _read_line(self, timeout_s: float) -> dict[str, int]:
        """The guard's next line of JSON; empty if the guard ends or writes nothing for `timeout_s`."""
        assert self._guard is not None and self._guard.stdout is not None
        pipe = self._guard.stdout.fileno()
        line = b""
        while not line.endswith(b"\n") and select.select([pipe], [], [], timeout_s)[0]:
            part = os.read(pipe, 1)
            if not part:
                break
            line += part
        return dict(json.loads(line)) if line.endswith(b"\n") else {}

    def _answers(self, port: int, path: str) -> bool:
        connection = http.client.HTTPConnection(self.settings.reachable, port, timeout=2.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _report(self, what: str) -> str:
        lines = "".join(f"\n  {line}" for line in logs.last_errors(self.settings.log))
        return f"tritonserver {what}; {self.settings.log} has:{lines or ' no lines'}"

    def _describe_end(self) -> str:
        if self._status is None and self._guard is not None:
            self._status = self._read_line(0.0).get("status")
        if self._status is None:
            return "is not running"
        killed = self._status < 0
        how = f"killed by {signal.Signals(-self._status).name}" if killed else f"exit status {self._status}"
        return f"ended by itself ({how})"


def _first_line(reasons: list[str]) -> str:
    """Of the first reason, without what the server puts before it; of none, where to look."""
    line = next(filter(None, reasons), "").partition("\n")[0]
    return line.removeprefix("Internal: ").removeprefix("TritonModelException: ") or "see the server's log"
