"""The guard: a process between a server and the program that started it, which outlives both and cleans up.

`server.TritonServer` starts it as `python -m shapeshift.triton.embedded.guard`, with a LaunchOrder as JSON on its
standard input. The guard starts tritonserver in a new session, writes one line of JSON with its pid, and keeps the
record of the run up to date. It stops everything on SIGTERM, when its parent ends, or when the server ends by itself.
In the last case it writes a line with the server's exit status and exits with 1, otherwise with 0. A server that a
signal has stopped is told to go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.loops import Failures
from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded import run_record as record
from shapeshift.triton.embedded.run_record import Record

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_POLL_S = 0.25
_SCAN_S = 2.0
# So long a server may be stopped (SIGSTOP), for instance to look at its memory.
_SUSPENDED_S = 1.0


@dataclass(frozen=True)
class LaunchOrder:
    """What the guard runs. log, record: files; owner: pid of the parent; grace_s: time for an orderly stop;
    prefix, about: see `run_record.Record`."""

    command: list[str]
    environment: dict[str, str]
    log: str
    record: str
    prefix: str
    owner: int
    grace_s: float
    about: dict[str, Any]


def main() -> int:
    """Read the order, run the server until it ends or must stop, and clean up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    order = LaunchOrder(**json.loads(sys.stdin.read()))
    libc = ctypes.CDLL(None)
    # Orphaned processes become children of the guard, so that it can find and reap them.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with Path(order.log).open("ab") as log:
        server = subprocess.Popen(
            order.command,
            env=order.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    current = Record(
        owner=processes.identify(order.owner),
        guard=processes.identify(os.getpid()),
        server=processes.identify(server.pid),
        prefix=order.prefix,
        about=order.about,
        boot=record.boot_id(),
    )
    record.write(current, Path(order.record))
    _write_line({"pid": server.pid})
    current, status = watch(current, order, server.pid)
    processes.stop(current, grace_s=order.grace_s if status is None else 0.0)
    _reap()
    Path(order.record).unlink(missing_ok=True)
    if status is None:
        return 0
    _write_line({"status": status})
    return 1


def watch(current: Record, order: LaunchOrder, server: int) -> tuple[Record, int | None]:
    """Update the record until the server must stop. Returns it, and the exit status if the server has ended."""
    scan_at, failures = 0.0, Failures(_log, "round")
    suspension = Suspension(server)
    while True:
        event = signal.sigtimedwait(_WATCHED, _POLL_S)
        status = _reap().get(server)
        if status is not None:
            return current, status
        if (event is not None and event.si_signo != signal.SIGCHLD) or os.getppid() != order.owner:
            return current, None
        # The server must not end because something beside it cannot be read.
        with failures.caught():
            suspension.end_if_due(time.monotonic())
            if time.monotonic() >= scan_at:
                scan_at = time.monotonic() + _SCAN_S
                before, current = current, processes.refresh(current)
                if current != before:
                    # The server keeps running without its record, for example after `make clean`.
                    with contextlib.suppress(OSError):
                        record.write(current, Path(order.record))


class Suspension:
    """Ends the suspension of process `pid`, a child of the caller that has not been reaped.

    While a server is stopped nobody is answered and requests pile up; no request in it is lost if it goes on.
    """

    def __init__(self, pid: int, allowed_s: float = _SUSPENDED_S) -> None:
        self._pid = pid
        self._allowed_s = allowed_s
        self._since: float | None = None

    def end_if_due(self, now: float) -> None:
        """Send SIGCONT if each call of the last `allowed_s` seconds has found the process stopped."""
        if not processes.is_suspended(self._pid):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= self._allowed_s:
            os.kill(self._pid, signal.SIGCONT)
            self._since = None
            _log(f"a signal had stopped the server; after {self._allowed_s:g} s it goes on")


def _reap() -> dict[int, int]:
    """The exit statuses, by pid, of the children that have ended since the last call; negative for a signal."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    return ended


def die_with_parent() -> Callable[[], None]:
    """The `preexec_fn` of a process that gets SIGTERM when this one ends; no signal is blocked in it."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _log(text: str) -> None:
    # A full disk, for one, ends no server.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"guard: {text}\n")
        sys.stderr.flush()


def _write_line(values: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(values).encode() + b"\n")


def encode(order: LaunchOrder) -> bytes:
    """The order in the form that `main` reads."""
    return json.dumps(dataclasses.asdict(order)).encode()


if __name__ == "__main__":
    sys.exit(main())
