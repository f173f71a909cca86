"""The process between a server and the program that started it: it outlives both and leaves nothing behind.

Started by `server.TritonServer` as `python -m shapeshift.triton.guard`, with an Order as JSON on its standard
input. It starts tritonserver in a session of its own, answers with one line of JSON holding its number,
keeps the run's record up to date, and stops everything when it is told to (SIGTERM), when its parent is gone,
or when the server ends by itself; then it adds a line with the server's exit status and its own is 1, not 0.
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

from shapeshift.triton import processes, record
from shapeshift.triton.record import Record

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_LOOK_S = 0.25
_SCAN_S = 2.0


@dataclass(frozen=True)
class Order:
    """What to run: the command and its environment, where to log and record, and how long a stop may take.

    `owner` is the process that gives the order; `about` goes into the record as it is.
    """

    command: list[str]
    environment: dict[str, str]
    log: str
    record: str
    prefix: str
    owner: int
    grace_s: float
    about: dict[str, Any]


def main() -> int:
    """Read the order and carry it out to the end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    order = Order(**json.loads(sys.stdin.read()))
    libc = ctypes.CDLL(None)
    # What loses its parent becomes this process's child, so that it can be found and collected.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with Path(order.log).open("ab") as log:
        server = subprocess.Popen(
            order.command,
            env=order.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent(libc),
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
    _tell({"pid": server.pid})
    current, status = _watch(current, order, server.pid)
    processes.stop(current, grace_s=order.grace_s if status is None else 0.0)
    _collect()
    Path(order.record).unlink(missing_ok=True)
    if status is None:
        return 0
    _tell({"status": status})
    return 1


def _watch(current: Record, order: Order, server: int) -> tuple[Record, int | None]:
    """Keep the record until it is time to stop; return it with the server's exit status if it has ended."""
    scan_at = 0.0
    while True:
        event = signal.sigtimedwait(_WATCHED, _LOOK_S)
        status = _collect().get(server)
        if status is not None:
            return current, status
        if (event is not None and event.si_signo != signal.SIGCHLD) or os.getppid() != order.owner:
            return current, None
        if time.monotonic() >= scan_at:
            scan_at = time.monotonic() + _SCAN_S
            before, current = current, processes.refreshed(current)
            if current != before:
                # Losing the record, say to `make clean`, must not cost the server.
                with contextlib.suppress(OSError):
                    record.write(current, Path(order.record))


def _collect() -> dict[int, int]:
    """The exit statuses of the children that have ended since the last call; negative for a signal."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _die_with_parent(libc: ctypes.CDLL) -> Callable[[], None]:
    guard = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() != guard:
            os._exit(1)

    return prepare


def _tell(values: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(values).encode() + b"\n")


def encode(order: Order) -> bytes:
    """The order as `main` reads it."""
    return json.dumps(dataclasses.asdict(order)).encode()


if __name__ == "__main__":
    sys.exit(main())
