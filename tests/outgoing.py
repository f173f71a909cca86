"""Counts the connections that a process and its children open to other machines, without root.

Two ways, which miss different things: a hook in each Python process, which sees every call of `socket` and every name
that is resolved; and the sockets of all processes below one, read from /proc again and again, which sees
native code as long as a connection is being made or lasts.
"""

from __future__ import annotations

import ipaddress
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

_LOG = "OUTGOING_LOG"
_PERIOD_S = 0.02
# Python runs it at the start of each process with this folder on PYTHONPATH.
# In place of an audit hook, which Python calls for many other things: a build takes three times as long with one.
_HOOK = f"""
import os, socket, sys

def _write(text):
    with open(os.environ[{_LOG!r}], "a") as stream:
        stream.write(f"{{os.getpid()}}\\t{{text}}\\n")

def _watch(owner, name, host_of):
    inner = getattr(owner, name)
    def call(*arguments, **options):
        host = host_of(arguments)
        if host:
            _write(f"to\\t{{host if isinstance(host, str) else host.decode()}}")
        return inner(*arguments, **options)
    setattr(owner, name, call)

def _of_address(arguments):
    # A method's first argument is the socket; an address is the last one, a tuple except for a local socket.
    return arguments[-1][0] if isinstance(arguments[-1], tuple) else None

if os.environ.get({_LOG!r}):
    _write("watched\\t" + os.path.basename(sys.executable or "embedded"))
    for _name in ("connect", "connect_ex", "sendto"):
        _watch(socket.socket, _name, _of_address)
    _watch(socket, "getaddrinfo", lambda arguments: arguments[0] if arguments else None)
"""


@dataclass
class Outgoing:
    """What was seen. environment: for the processes to watch."""

    environment: dict[str, str]
    log: Path
    sampled: set[str] = field(default_factory=set)

    @property
    def found(self) -> set[str]:
        """The hosts that a connection, a datagram or a look-up of a name was for."""
        return self.sampled | {host for kind, host in self._lines() if kind == "to" and not is_local(host)}

    @property
    def watched(self) -> int:
        """How many Python processes had the hook."""
        return sum(kind == "watched" for kind, _ in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        lines = self.log.read_text().splitlines() if self.log.is_file() else []
        return [(parts[1], parts[2]) for line in lines if len(parts := line.split("\t")) == 3]


@contextmanager
def watch(folder: Path, root: int | None = None) -> Iterator[Outgoing]:
    """Watch the processes that are started with `environment` below process `root`, by default this one."""
    (folder / "sitecustomize.py").write_text(_HOOK)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    outgoing = Outgoing({"PYTHONPATH": path, _LOG: str(folder / "log")}, folder / "log")
    with _Sampler(os.getpid() if root is None else root, outgoing.sampled):
        yield outgoing


class _Sampler:
    """A thread that reads the sockets of all processes below `root`; that one's own are not counted."""

    def __init__(self, root: int, found: set[str]) -> None:
        self._root = root
        self._found = found
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            remote = remote_addresses()
            if remote:
                inodes = {inode for pid in descendants(self._root) for inode in socket_inodes(pid)}
                self._found.update(address for inode, address in remote.items() if inode in inodes)


def is_local(host: str) -> bool:
    """Whether `host` is this machine, or every address of it."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host in ("localhost", "")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def remote_addresses() -> dict[str, str]:
    """The remote address of each socket that is connected, or connecting, to another machine, by inode."""
    found = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        table = Path("/proc/self/net") / name
        for line in table.read_text().splitlines()[1:] if table.is_file() else []:
            fields = line.split()
            address = _address(fields[2].partition(":")[0])
            if not is_local(address):
                found[fields[9]] = address
    return found


def _address(digits: str) -> str:
    """The kernel writes words of 4 bytes, each in the order of the machine."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def descendants(root: int) -> set[int]:
    """The processes below `root`."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def socket_inodes(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            target = str(Path(entry.path).readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass
    return found
