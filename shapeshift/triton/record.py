"""What a running server consists of, kept in a file so that anybody can clean up after it.

A process is known by its number and its start time: a number alone may have passed to another program.
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
    """One process: its number and its start in clock ticks since boot."""

    pid: int
    start: int


@dataclass(frozen=True)
class Member:
    """A process of the server's session; `region` is the shared memory that a stub was given, or empty."""

    pid: int
    start: int
    region: str = ""


@dataclass(frozen=True)
class Record:
    """One run of a server.

    `prefix` begins the name of every shared-memory region of this run and of no other. `members` are the
    processes last seen, `regions` all regions seen that may still exist. `about` is for people and tools.
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
    """A region prefix that no other run has."""
    return f"shapeshift_{secrets.token_hex(6)}_"


def boot_id() -> str:
    """The kernel's name for the time since its last start; empty where it has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def write(record: Record, path: Path) -> None:
    """Write `record` to `path` in one step."""
    files.replace_text(path, json.dumps(dataclasses.asdict(record), indent=1) + "\n")


def read(path: Path) -> Record | None:
    """The record in `path`; None without a file, or for one that is damaged or from before the last boot."""
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
    names = [record.prefix, *record.regions]
    if record.boot != boot_id() or not _PREFIX.fullmatch(record.prefix):
        return None
    return record if all(_REGION.fullmatch(name) for name in names) else None
