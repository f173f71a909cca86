"""Finds and ends the processes of one server run, and removes its shared-memory regions.

Linux only. What other programs put into /proc and /dev/shm (any bytes in a name, entries that may not be read) raises
nothing. /proc is read without psutil: a process is the same only if its start, in clock ticks since boot, is the same,
and psutil's `create_time` counts from a wall clock that may be set meanwhile. A look at 83 processes takes 1.4 ms, and
3.8 ms with psutil (7.2), which would save some ten lines here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shapeshift.triton.embedded.run_record import Identity, Member, Record, is_region

_PROC = Path("/proc")
_SHM = Path("/dev/shm")
# The kernel stores fifteen characters of a program name.
_STUB = "triton_python_backend_stub"[:15]
# Arguments of a stub (24.10): its shared-memory region, and the instance of the model.
_REGION, _INSTANCE = 2, 8
# The kernel's number of a socket's state.
_LISTEN = "0A"
_KILL_S = 1.0
_STEP_S = 0.02


class Stub(NamedTuple):
    """The process of an instance of a Python model. server: pid of its server."""

    identity: Identity
    server: int
    instance: str


class Entry(NamedTuple):
    """One entry of the process table. state: the kernel's letter, such as T of a process that a signal has stopped."""

    identity: Identity
    name: str
    parent: int
    session: int
    state: str


def look_up(pid: int) -> Entry | None:
    """The running process `pid`; None if there is none, if it is a zombie, or if its entry cannot be read."""
    try:
        # The name, in parentheses, may contain any bytes: parentheses and line ends too.
        head, _, tail = (_PROC / str(pid) / "stat").read_bytes().decode(errors="replace").rpartition(")")
        state, parent, _, session, *rest = tail.split()
        entry = Entry(Identity(pid, int(rest[15])), head.partition("(")[2], int(parent), int(session), state)
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" else entry


def identify(pid: int) -> Identity:
    """The identity of process `pid`; its start is 0 if it has ended."""
    entry = look_up(pid)
    return entry.identity if entry else Identity(pid, 0)


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process is running."""
    entry = look_up(identity.pid)
    return entry is not None and entry.identity == identity


def is_suspended(pid: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped the process `pid`; false for one that a debugger holds."""
    entry = look_up(pid)
    return entry is not None and entry.state == "T"


def stub(pid: int) -> Stub | None:
    """The process `pid` if it is that of a Python model; else None."""
    entry = look_up(pid)
    return None if entry is None else _as_stub(entry)


def stubs() -> list[Stub]:
    """The running processes of Python models, of all servers on this machine."""
    return [*filter(None, map(_as_stub, _table()))]


def has_successor(ended: Stub) -> bool:
    """Whether another process of this instance is running, as during a load and after it."""
    return any((one.server, one.instance) == (ended.server, ended.instance) for one in stubs())


def listens(pid: int, port: int) -> bool:
    """Whether the process listens on this TCP port, in the network of the calling process.

    False for one that may not be looked into, or in another network: a container has ports of its own.
    """
    folder, sockets = _PROC / str(pid), set()
    with contextlib.suppress(OSError, ValueError, IndexError):
        if (folder / "ns" / "net").readlink() != (_PROC / "self" / "ns" / "net").readlink():
            return False
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(FileNotFoundError):
                rows = [line.split() for line in (folder / "net" / table).read_text().splitlines()[1:]]
                listening = [row for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]
                sockets |= {f"socket:[{row[9]}]" for row in listening}
        return any(str(descriptor.readlink()) in sockets for descriptor in (folder / "fd").iterdir())
    return False


def kill(identity: Identity) -> bool:
    """Kill exactly this process; whether it was running and may be killed."""
    return _send(identity, signal.SIGKILL)


def members(record: Record) -> list[Member]:
    """The running processes of this run.

    These are the recorded ones, the stubs with its region prefix, all processes in the server's session if one of the
    former is in it, and the children of the calling process if it is the guard of this run.
    """
    recorded = {record.server} | {member.identity for member in record.members}
    table = [(entry, _region(entry)) for entry in _table()]
    certain = {
        entry.identity for entry, region in table if entry.identity in recorded or region.startswith(record.prefix)
    }
    # While a certain member is in the session, no other session can have its id.
    session = any(entry.identity in certain and entry.session == record.server.pid for entry, _ in table)
    adopted = os.getpid() if os.getpid() == record.guard.pid else -1
    return [
        Member(entry.identity.pid, entry.identity.start, region)
        for entry, region in table
        if entry.identity in certain or (session and entry.session == record.server.pid) or entry.parent == adopted
    ]


def refresh(record: Record) -> Record:
    """`record` with its processes and regions that exist now."""
    running = members(record)
    seen = {*record.regions, *(member.region for member in running if member.region)}
    return dataclasses.replace(record, members=tuple(running), regions=tuple(_existing(record.prefix, seen)))


def stop(record: Record, grace_s: float) -> None:
    """Terminate the server, kill what still runs after `grace_s` seconds, and remove the run's regions.

    Returns within `grace_s` + 1.5 seconds, whatever state the processes are in.
    """
    record = refresh(record)
    if grace_s > 0 and is_alive(record.server):
        # A process that SIGSTOP has stopped would block the orderly end of the others.
        for number in (signal.SIGTERM, signal.SIGCONT):
            for member in record.members:
                if number == signal.SIGCONT or member.pid == record.server.pid:
                    _send(member.identity, number)
        deadline = time.monotonic() + grace_s
        while is_alive(record.server) and time.monotonic() < deadline:
            time.sleep(_STEP_S)
    deadline = time.monotonic() + _KILL_S
    while (record := refresh(record)).members and time.monotonic() < deadline:
        for member in record.members:
            kill(member.identity)
        time.sleep(_STEP_S)
    remove_regions(record)


def remove_regions(record: Record) -> None:
    """Remove the recorded shared-memory regions of the run and all regions with its prefix."""
    for name in _existing(record.prefix, set(record.regions)):
        with contextlib.suppress(OSError):
            (_SHM / name).unlink()


def _send(identity: Identity, number: signal.Signals) -> bool:
    if is_alive(identity):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(identity.pid, number)
            return True
    return False


def _existing(prefix: str, recorded: set[str]) -> list[str]:
    try:
        names = [path.name for path in _SHM.iterdir()]
    except OSError:
        return []
    return sorted(name for name in names if name in recorded or (name.startswith(prefix) and is_region(name)))


def _table() -> Iterator[Entry]:
    for path in _PROC.iterdir():
        if path.name.isdigit() and (entry := look_up(int(path.name))) is not None:
            yield entry


def _as_stub(entry: Entry) -> Stub | None:
    if entry.name != _STUB:
        return None
    return Stub(entry.identity, entry.parent, _argument(entry, _INSTANCE))


def _region(entry: Entry) -> str:
    """The shared-memory region of a stub; empty for any other process."""
    return _argument(entry, _REGION) if entry.name == _STUB else ""


def _argument(entry: Entry, index: int) -> str:
    """One argument of the process's command line; empty if it has fewer."""
    try:
        line = (_PROC / str(entry.identity.pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    arguments = line.decode(errors="replace").split("\0")
    return arguments[index] if len(arguments) > index else ""
