"""The processes and shared-memory regions of a running server, in a file, so that any later start can clean up.

A process is identified by its pid and its start time, because another program may reuse the pid.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift import files

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PREFIX = re.compile(r"shapeshift_[0-9a-f]{12}_")
_REGION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Identity:
    """One process. start: clock ticks since boot."""

    pid: int
    start: int


@dataclass(frozen=True)
class Member:
    """A process of the server's session. region: the shared-memory region of a stub, else empty."""

    pid: int
    start: int
    region: str = ""

    @property
    def identity(self) -> Identity:
        """The process itself."""
        return Identity(self.pid, self.start)


@dataclass(frozen=True)
class Record:
    """One run of a server.

    owner: the process that started it. prefix: with which the names of all shared-memory regions of this run begin,
    and of no other run. members: the processes seen last. regions: all regions seen that may still exist. about:
    addresses and models, for readers. boot: id of the system boot.
    """

    owner: Identity
    guard: Identity
    server: Identity
    prefix: str
    members: tuple[Member, ...] = ()
    regions: tuple[str, ...] = ()
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    boot: str = ""


def new_prefix() -> str:
    """A unique region prefix."""
    return f"shapeshift_{secrets.token_hex(6)}_"


def boot_id() -> str:
    """The kernel's id of the current boot; empty if there is none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def write(record: Record, path: Path) -> None:
    """Replace the file `path` in one step."""
    files.replace_text(path, json.dumps(dataclasses.asdict(record), indent=1) + "\n")


def read(path: Path) -> Record | None:
    """The record in `path`; None if it is missing, damaged or from an earlier boot."""
    try:
        values = json.loads(path.read_text())
        record = Record(
            owner=Identity(**values["owner"]),
            guard=Identity(**values["guard"]),
            server=Identity(**values["server"]),
            prefix=values["prefix"],
            members=tuple(Member(**member) for member in values["members"]),
            regions=tuple(values["regions"]),
            about=dict(values["about"]),
            boot=values["boot"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if record.boot != boot_id() or not _PREFIX.fullmatch(record.prefix):
        return None
    return record if all(map(is_region, record.regions)) else None


def is_region(name: str) -> bool:
    """Whether a shared-memory region of a run can have this name."""
    return _REGION.fullmatch(name) is not None
