"""The server that runs on a build folder: its model control, and models that it loads while others are built."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shapeshift.cli.running import memory
from shapeshift.cli.served_models import models_called_by
from shapeshift.cli.sidecar import running_at, server_key
from shapeshift.engines import hardware
from shapeshift.errors import InvalidInputError, ModelGoneError, ShapeshiftError
from shapeshift.loops import Backoff
from shapeshift.triton.endpoint import tls_from_environment

if TYPE_CHECKING:
    from shapeshift.triton.control import ModelControl

_CONNECT_S = 2.0


@contextlib.contextmanager
def running_server(build: Path, address: str | None = None) -> Iterator[ModelControl | None]:
    """Model control of the server at `address`, or else of the one that runs on the build folder; None if none does."""
    run_directory = build / "run"
    running = running_at(run_directory)
    server = address or (running.grpc if running else "")
    if not server or (not address and not _answers(server)):
        yield None
        return
    # The gRPC client is slow to import.
    from shapeshift.triton.control import ModelControl

    with ModelControl(server, server_key(run_directory), tls_from_environment()) as control:
        yield control


def _answers(address: str) -> bool:
    """Whether a program listens at `address`, HOST:PORT; the record of a server stays when it has ended."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except ValueError:
        raise InvalidInputError("server", address, "HOST:GRPCPORT") from None
    except OSError:
        return False
    return True


class Loader:
    """Loads models of a generated repository, as many at once as there are cores, beside what its caller does.

    The end of its block waits for the loads. load: raises ModelGoneError while the server is away: one that is started
    again within `returns_s` loads the model. say: takes one line, from any thread, for each model that is left out.
    """

    def __init__(
        self, load: Callable[[str], None], repository: Path, say: Callable[[str], None], returns_s: float = 120.0
    ) -> None:
        self._load = load
        self._returns_s = returns_s
        self._is_ended = threading.Event()
        self._repository = repository
        self._say = say
        self._pool = ThreadPoolExecutor(hardware.cores())
        self._loads: dict[str, Future[bool]] = {}
        self._lock = threading.Lock()
        # One plan for all: those that are being loaded have taken a part of their memory, nobody knows how much.
        self._free = memory.Free()
        self._accepted: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._is_ended.set()
        self._pool.shutdown(wait=kind is None, cancel_futures=kind is not None)

    @property
    def loaded(self) -> set[str]:
        """The models that were loaded, once all loads have ended."""
        return {name for name, load in self._loads.items() if load.result()}

    def start(self, name: str) -> None:
        """Load a model if it fits, and if the models that it calls, which were given before it, could be loaded."""
        self._loads[name] = self._pool.submit(self._try, name)

    def _try(self, name: str) -> bool:
        called = [one for one in models_called_by(name, [self._repository]) if one in self._loads]
        if lacking := [one for one in called if not self._loads[one].result()]:
            self._say(f"skipping {name}: it needs {lacking[0]}")
            return False
        with self._lock:
            if reason := memory.plan([self._repository], [*self._accepted, name], self._free)[1].get(name):
                self._say(f"skipping {name}, which does not fit: {reason}")
                return False
            self._accepted.append(name)
        try:
            self._load_once_it_is_back(name)
        except ShapeshiftError as error:
            self._say(f"skipping {name}, which could not be loaded: {str(error).partition(chr(10))[0]}")
            with self._lock:
                self._accepted.remove(name)
            return False
        return True

    def _load_once_it_is_back(self, name: str) -> None:
        backoff, begun = Backoff(), time.monotonic()
        while True:
            try:
                return self._load(name)
            except ModelGoneError:
                if self._is_ended.wait(backoff.pause(0.0)) or time.monotonic() - begun > self._returns_s:
                    raise
