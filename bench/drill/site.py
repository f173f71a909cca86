"""The served site: `shapeshift serve` on ports of its own, started again when it ends, and its processes by role."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import psutil

from bench.common.output import BUILD
from bench.drill import models
from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.sidecar import run_files
from shapeshift.triton.control import ModelControl
from shapeshift.triton.embedded import processes, run_record
from shapeshift.triton.embedded.free_ports import on_free_ports
from shapeshift.triton.embedded.guard import die_with_parent
from shapeshift.triton.keys import read_key
from shapeshift.triton.settings import ServerSettings

READY = "Ctrl-C stops the server"
_POLL_S = 0.1
_RESTART_S = 0.5
_STOP_S = 20.0


class Footprint(NamedTuple):
    """What one process holds, or the sum of several: memory, descriptors, threads, regions of shared memory."""

    processes: int = 0
    rss_mb: float = 0.0
    fds: int = 0
    threads: int = 0
    regions: int = 0

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Of a process, now; nothing if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            return cls(1, process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
        return cls()

    @classmethod
    def total(cls, pids: Iterable[int], prefixes: Iterable[str], shm: Path = Path("/dev/shm")) -> Footprint:
        """Of the processes together, with all regions in `shm` whose names begin with one of `prefixes`."""
        beginnings = tuple(prefixes)
        regions = sum(file.name.startswith(beginnings) for file in shm.iterdir()) if beginnings else 0
        return cls(*map(sum, zip(cls(regions=regions), *map(cls.of, pids), strict=True)))


class Site:
    """A context manager: `serve` runs inside. environment: added to that of `serve`.

    As systemd would, it starts `serve` again whenever that ends.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.settings = on_free_ports(
            ServerSettings(repositories=(models.REPOSITORY,), run_directory=models.FOLDER / "run")
        )
        self.log = models.FOLDER / "serve.log"
        self.starts = 0
        self._environment = {**os.environ, **environment}
        self._prefixes: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="systemd", daemon=True)

    def __enter__(self) -> Self:
        self.log.unlink(missing_ok=True)
        self._start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        assert self._process is not None
        # A process that a fault has stopped would not end.
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._process.send_signal(number)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def grpc_url(self) -> str:
        """HOST:PORT of the gRPC interface."""
        return f"{self.settings.reachable}:{self.settings.grpc_port}"

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of the HTTP interface."""
        return self.settings.reachable, self.settings.http_port

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until `serve` says that the models are ready. Raises ShapeshiftError."""
        end = time.monotonic() + timeout_s
        while READY not in self.log.read_text():
            if time.monotonic() > end or self.starts > 1:
                raise ShapeshiftError(f"the server is not ready; {self.log} says why")
            time.sleep(_POLL_S)

    def control(self) -> ModelControl:
        """A new connection to model control."""
        return ModelControl(self.grpc_url, read_key(self.settings.key_file))

    def pid(self, role: str) -> int:
        """The process id of `serve`, `guard`, `server`, `sidecar`, or of the model `role`. Raises NotFoundError."""
        pids = self.processes()
        if role not in pids:
            raise NotFoundError(f"no process of {role}; there are: {', '.join(pids)}")
        return pids[role]

    def processes(self) -> dict[str, int]:
        """The process ids by role; of a model with two processes, the newer one and `MODEL (old)`."""
        pids = {"serve": self._process.pid} if self._process is not None else {}
        if (sidecar := run_files.lock_holder(self.settings.run_directory)) is not None:
            pids["sidecar"] = sidecar
        record = run_record.read(self.settings.record)
        if record is None:
            return pids
        self._prefixes.add(record.prefix)
        pids |= {"guard": record.guard.pid, "server": record.server.pid}
        # /proc may list a process twice while others begin and end.
        running = sorted({(member.start, member.pid) for member in processes.members(record)})
        for pid in (pid for _, pid in running if pid not in pids.values()):
            stub = processes.stub(pid)
            # MODEL_GROUP_NUMBER
            name = stub.instance.rsplit("_", 2)[0] if stub is not None else f"process {pid}"
            if name in pids:
                pids[f"{name} (old)"] = pids[name]
            pids[name] = pid
        return pids

    def footprint(self) -> Footprint:
        """What all processes hold, with the shared memory of this and of earlier servers."""
        return Footprint.total(self.processes().values(), self._prefixes)

    def footprints(self) -> dict[str, Footprint]:
        """What each process holds."""
        return {name: Footprint.of(pid) for name, pid in self.processes().items()}

    def _supervise(self) -> None:
        while not self._closing.wait(_POLL_S):
            assert self._process is not None
            if self._process.poll() is not None and not self._closing.wait(_RESTART_S):
                self._start()

    def _start(self) -> None:
        self.starts += 1
        command = [sys.executable, "-P", "-m", "shapeshift.cli.main", "serve", "--build", str(models.FOLDER)]
        command += ["--backends", str(models.BACKENDS), "--triton", str(BUILD / "triton"), "--strict", "--no-gateway"]
        for name, port in self.settings.ports.items():
            command += [f"--{name}-port", str(port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )


def generation_raised(config: dict[str, object]) -> dict[str, object]:
    """`config` with the next generation, so that Triton replaces the model's process."""
    changed = json.loads(json.dumps(config))
    parameters = changed["parameters"]
    value = int(parameters.get("generation", {}).get("string_value") or 0)
    parameters["generation"] = {"string_value": str(value + 1)}
    return dict(changed)
