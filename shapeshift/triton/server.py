"""Starts, watches and stops one tritonserver.

settings = ServerSettings(repositories=(Path("build/repository"),), models=("encode",))
with TritonServer(settings) as server:
    server.wait_ready()
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from shapeshift.errors import ShapeshiftError
from shapeshift.triton import guard, keys, launch, leftovers, logs, record
from shapeshift.triton.settings import ServerSettings

__all__ = ["ServerEndedError", "ServerSettings", "TritonServer"]

_BEYOND_EXIT_S = 1.0
_KILL_S = 1.5
_HAND_OVER_S = 30.0


class ServerEndedError(ShapeshiftError):
    """The server ended without being told to."""


class TritonServer:
    """One server and its guard process; a context manager that starts on entry and stops on exit.

    Should this program end without stop(), however it ends, the guard stops the server in its place. `key` opens
    the restricted interfaces; it is empty until the first start.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.key = ""
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """The number of the tritonserver process, also after it has ended."""
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
        return f"{self.settings.reachable}:{self.settings.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The whole address of the metrics page."""
        return f"http://{self.settings.reachable}:{self.settings.metrics_port}/metrics"

    @property
    def is_running(self) -> bool:
        """Whether the server was started and neither stopped nor ended by itself."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> Self:
        """Start the server, first ending what an earlier run in the same run directory left behind.

        Returns before any model is loaded. The log is begun anew, the last one kept beside it. Raises
        ShapeshiftError if the run directory is in use, a port is taken, or something it needs is missing.
        """
        if self._guard is not None:
            raise ShapeshiftError("the server was already started; stop() it first")
        settings = self.settings
        launch.require_models(settings)
        launch.require_matching_environment(settings.triton)
        for folder in (settings.run_directory, settings.log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with leftovers.sole_use(settings.run_directory, settings.record) as lock:
            launch.require_free_ports(settings.address, settings.ports)
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
            self._hand_over(order)
        except BaseException:
            self.stop()
            raise
        return self

    def poll_ready(self) -> bool:
        """Whether the server and all its loaded models are ready, and its metrics too, whose port opens last.

        Raises ServerEndedError if it ended.
        """
        self.require_running()
        return self._answers(self.settings.http_port, "/v2/health/ready") and self._answers(
            self.settings.metrics_port, "/metrics"
        )

    def wait_ready(self, timeout_s: float = 120.0) -> Self:
        """Wait until `poll_ready`. Raises ShapeshiftError with the log's errors otherwise."""
        deadline = time.monotonic() + timeout_s
        while not self.poll_ready():
            if time.monotonic() > deadline:
                raise self.failure(f"was not ready after {timeout_s:g} s")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """Stop the server and all that it started, within 10 s; safe to call again."""
        if self._guard is None:
            return
        self._guard.terminate()
        self._guard.send_signal(signal.SIGCONT)
        try:
            self._guard.wait(timeout=self._grace_s + _KILL_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        left = record.read(self.settings.record)
        if left is not None and left.guard.pid == self._guard.pid:
            leftovers.clean(self.settings.record)
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._guard = None

    def require_running(self) -> None:
        """Raise ServerEndedError, with how it ended and the last errors of its log, unless it is running."""
        if not self.is_running:
            raise ServerEndedError(self._report(self._end()))

    def failure(self, what: str) -> ShapeshiftError:
        """An error that says `what` befell the server, and the last errors of its log."""
        return ShapeshiftError(self._report(what))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _grace_s(self) -> float:
        return self.settings.exit_timeout_s + _BEYOND_EXIT_S

    def _order(self) -> guard.Order:
        settings = self.settings
        self.key = keys.ensure_key(settings.key_file)
        prefix = record.new_prefix()
        environment = launch.environment(settings)
        return guard.Order(
            command=launch.command(settings, environment, self.key, prefix),
            environment=environment,
            log=str(settings.log.resolve()),
            record=str(settings.record.resolve()),
            prefix=prefix,
            owner=os.getpid(),
            grace_s=self._grace_s,
            about={"host": settings.address, "ports": settings.ports, "models": list(settings.models)},
        )

    def _hand_over(self, order: guard.Order) -> None:
        assert self._guard is not None and self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(guard.encode(order))
            self._guard.stdin.close()
        answer = self._hear(_HAND_OVER_S)
        if "pid" not in answer:
            raise self.failure("did not start")
        self._pid, self._status = answer["pid"], None

    def _hear(self, timeout_s: float) -> dict[str, int]:
        """The guard's next line; empty if it ends or says nothing for `timeout_s`."""
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
        return f"tritonserver {what}; {self.settings.log} says:{lines or ' nothing'}"

    def _end(self) -> str:
        if self._status is None and self._guard is not None:
            self._status = self._hear(0.0).get("status")
        if self._status is None:
            return "is not running"
        killed = self._status < 0
        how = f"killed by {signal.Signals(-self._status).name}" if killed else f"exit status {self._status}"
        return f"ended by itself ({how})"
