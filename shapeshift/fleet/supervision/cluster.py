"""Ray: a cluster that runs, or one on this machine that this module starts.

Ray's processes listen on loopback only where this module starts them, and ask for a token.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.errors import ShapeshiftError, UnsupportedError
from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.free_ports import free_ports
from shapeshift.triton.embedded.run_record import Identity

# The defaults of these are fixed numbers, which a second cluster on this machine would find taken.
_STATED_PORTS = ("ray-client-server", "dashboard-agent-listen")
_STATE_FILE = "ray.json"
_TOKEN_FILE = "ray-token"
_LOG_FILE = "ray.log"
_STARTS = 3
_STOP_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 120.0
_PERIOD_S = 0.2
# Ports of the kernel's choice, so that several clusters fit on one machine.
_COMMON = ("--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats", "--object-store-memory=80000000")
SETTINGS = {
    # A node's server outlives its supervisor.
    "RAY_kill_child_processes_on_worker_exit": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray takes the address of a network card in place of 127.0.0.1 unless it knows that there is one machine only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""What the processes of a cluster that is started here and all that connect to it must agree on."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster. folder: for the files of one that this machine starts. address: of its head; empty: started."""

    folder: Path
    address: str = ""

    def connect(self, namespace: str, cpus: float = 0.0) -> Any:
        """The module ray, connected. Starts a cluster with `cpus` on this machine where no address is given.

        Raises UnsupportedError where Ray is not installed, ShapeshiftError where no cluster answers.
        """
        # Ray reads the environment when it is imported.
        self._set_environment()
        try:
            import ray
        except ModuleNotFoundError:
            raise UnsupportedError("ray is not installed: pip install 'shapeshift[fleet]'") from None
        address = self.address or self._running() or self._start(cpus)
        if not ray.is_initialized():
            try:
                ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # noqa: BLE001  Ray raises errors of many kinds
                raise ShapeshiftError(f"no Ray cluster answers at {address}: {error}") from error
        return ray

    @property
    def is_running(self) -> bool:
        """Whether there is a cluster to connect to: one with an address, or the one that was started here."""
        return bool(self.address) or bool(self._running())

    def stop(self) -> None:
        """End the cluster that this machine has started; one with an address keeps running."""
        head = self._head()
        if self.address or head is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(head.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while processes.is_alive(head) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes.kill(head)
        (self.folder / _STATE_FILE).unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill every process of the cluster that was started here, as a crash would."""
        if (head := self._head()) is not None:
            os.killpg(head.pid, signal.SIGKILL)
            while processes.is_alive(head):
                time.sleep(0.05)

    def _set_environment(self) -> None:
        if self.address:
            # Whoever runs that cluster says how it is entered.
            return
        os.environ.update(SETTINGS)
        token = self.folder / _TOKEN_FILE
        if not token.is_file():
            files.replace_private(token, secrets.token_hex(32).encode())
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def _head(self) -> Identity | None:
        """The process of the head that was started here, if it runs."""
        try:
            state = json.loads((self.folder / _STATE_FILE).read_text())
            head = Identity(int(state["pid"]), int(state["start"]))
        except (OSError, ValueError, KeyError):
            return None
        return head if processes.is_alive(head) else None

    def _running(self) -> str:
        if self._head() is None:
            return ""
        return str(json.loads((self.folder / _STATE_FILE).read_text())["address"])

    def _start(self, cpus: float) -> str:
        """The address of a head that is started on loopback; tried again, since Ray gives up on a busy machine."""
        for _ in range(_STARTS):
            if (address := self._started(cpus)) is not None:
                return address
        log = self.folder / _LOG_FILE
        lines = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise ShapeshiftError(f"Ray did not start; {log} ends with: {' / '.join(lines)}")

    def _started(self, cpus: float) -> str | None:
        """Start a head and wait until it answers; None if it does not."""
        port, *others = islice(free_ports(), 1 + len(_STATED_PORTS))
        options = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--num-cpus={max(1, round(cpus))}"]
        options += [f"--{name}-port={other}" for name, other in zip(_STATED_PORTS, others, strict=True)]
        log = self.folder / _LOG_FILE
        process = start_ray([*options, "--include-dashboard=false"], log)
        head = processes.identify(process.pid)
        address = f"127.0.0.1:{port}"
        state = {"pid": head.pid, "start": head.start, "address": address}
        files.replace_text(self.folder / _STATE_FILE, json.dumps(state) + "\n")
        if not has_started(process, log):
            self.stop()
            return None
        return address


def start_ray(options: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `ray start --block` in a session of its own, with its output in `log`.

    variables: its environment; None: that of this process.
    """
    program = Path(sys.executable).with_name("ray")
    with log.open("wb") as stream:
        return subprocess.Popen(
            [str(program), "start", "--block", *options, *_COMMON],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )


def has_started(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until it runs; False if it gives up, as it does on a busy machine, or takes longer than two minutes."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(_PERIOD_S)
    return True
