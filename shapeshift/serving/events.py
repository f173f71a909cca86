"""What the process of a model did last: short records in a bounded ring that other processes may read.

A ring is a file that the process maps. `record` overwrites the oldest record, and waits for nobody; a reader that is
too slow loses what was overwritten. Records have no texts of requests. `shapeshift live` reads them,
and `shapeshift record` those of requests, which are written while it asks for them.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "SHAPESHIFT_EVENTS"
"""The environment variable with the folder of the rings; without it nothing is recorded."""
TRACES_VARIABLE = "SHAPESHIFT_TRACES"
"""The environment variable with the URL that `serving.traces` sends to, by OTLP over HTTP; without it nothing is."""
TRACE_RATE_VARIABLE = "SHAPESHIFT_TRACE_RATE"
"""And the one with how many requests come to one that is traced; Triton has the same number."""
SUFFIX = ".ring"
_UNFINISHED = ".new"

_MAGIC = b"SHAPERG1"
# Of the file: magic, and how many records have been written.
_HEAD = struct.Struct("<8sQ")
_WRITTEN, _WRITTEN_AT = struct.Struct("<Q"), 8
# Until when, on the monotonic clock, a reader wants a record of each request.
_WANTED, _WANTED_AT = struct.Struct("<d"), 16
_START = 64
# Of a record: its number, a checksum of number and text, and the length of the text.
_RECORD = struct.Struct("<QIH")
_NUMBER = struct.Struct("<Q")
RECORD_BYTES = 384
RECORDS = 4096
_MOST_TEXT = RECORD_BYTES - _RECORD.size
# Beside them a record has its kind and its time.
_MOST_ROWS = _MOST_TEXT - 60

# Numbers of numpy become plain ones.
encode = json.JSONEncoder(separators=(",", ":"), default=float).encode


Log = Callable[[str], None]


class Event(NamedTuple):
    """A record. at: monotonic seconds, which all processes of a machine count alike."""

    kind: str
    at: float
    values: dict[str, Any]


class Ring:
    """The writing end. Any number of threads of one process may call `write`."""

    def __init__(self, file: Path, records: int = RECORDS) -> None:
        """Raises OSError where the file cannot be made, or the disk has no room for all of it."""
        self._records = records
        size = _START + records * RECORD_BYTES
        unfinished = file.with_suffix(_UNFINISHED)
        try:
            descriptor = os.open(unfinished, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
            try:
                # A page without a place on the disk would end the process when it is written.
                os.posix_fallocate(descriptor, 0, size)
                self._memory = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
            _HEAD.pack_into(self._memory, 0, _MAGIC, 0)
            unfinished.replace(file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self._next = 0
        # A thread that is late would take the count back, and so hide what others have written since.
        self._lock = threading.Lock()

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Add a record. In one that is longer than `RECORD_BYTES` allows each list becomes its length.

        What is still too long is left out.
        """
        at = round(time.monotonic(), 4)
        text = encode([kind, at, values]).encode()
        if len(text) > _MOST_TEXT:
            counted = {name: len(value) if isinstance(value, list) else value for name, value in values.items()}
            text = encode([kind, at, counted]).encode()
            if len(text) > _MOST_TEXT:
                return
        with self._lock:
            number, self._next = self._next, self._next + 1
            start = _START + number % self._records * RECORD_BYTES
            record = _RECORD.pack(number, _checksum(number, text), len(text)) + text
            self._memory[start : start + len(record)] = record
            _WRITTEN.pack_into(self._memory, _WRITTEN_AT, number + 1)

    def write_rows(self, kind: str, rows: Iterable[Any]) -> None:
        """Add records with a list `rows`, as many as fit in each. A row that is too long alone is left out."""
        part, size = list[Any](), 0
        for row in rows:
            length = len(encode(row)) + 1
            if size + length > _MOST_ROWS:
                self.write(kind, {"rows": part})
                part, size = [], 0
            if length <= _MOST_ROWS:
                part.append(row)
                size += length
        if part:
            self.write(kind, {"rows": part})

    @property
    def wants_requests(self) -> bool:
        """Whether a reader has asked for a record of each request."""
        return time.monotonic() < float(_WANTED.unpack_from(self._memory, _WANTED_AT)[0])


class RingReader:
    """The reading end, of any process. lost: records that were overwritten before they were read."""

    def __init__(self, file: Path) -> None:
        """Raises OSError where there is no such file, ValueError where it is no ring."""
        with file.open("rb") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            self._inode = os.fstat(opened.fileno()).st_ino
        self._file = file
        if self._memory[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{file} is no ring of this version")
        self._records = (len(self._memory) - _START) // RECORD_BYTES
        self._next = 0
        self.lost = 0

    @property
    def is_replaced(self) -> bool:
        """Whether the file is another one now: that of a later process with the same number."""
        try:
            return self._file.stat().st_ino != self._inode
        except OSError:
            return False

    def read(self) -> list[Event]:
        """The records since the last call that are still there, in order."""
        (written,) = _WRITTEN.unpack_from(self._memory, _WRITTEN_AT)
        oldest = max(written - self._records, 0)
        if self._next < oldest:
            self.lost += oldest - self._next
            self._next = oldest
        events = []
        while self._next < written:
            start = _START + self._next % self._records * RECORD_BYTES
            record = self._memory[start : start + RECORD_BYTES]
            number, checksum, length = _RECORD.unpack_from(record)
            text = record[_RECORD.size : _RECORD.size + length]
            if checksum == _checksum(number, text) and number == self._next:
                events.append(Event(*json.loads(text)))
            elif number > self._next:
                self.lost += 1
            else:
                # It is being written.
                break
            self._next += 1
        return events

    def want_requests(self, seconds: float) -> None:
        """Ask for a record of each request that ends in the next seconds. Raises OSError."""
        with self._file.open("r+b") as opened:
            os.pwrite(opened.fileno(), _WANTED.pack(time.monotonic() + seconds), _WANTED_AT)

    def close(self) -> None:
        """End the reading."""
        self._memory.close()


def _checksum(number: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(_NUMBER.pack(number)))


# The ring of this process, which serves one model.
_ring: Ring | None = None
_file: Path | None = None


def open_ring(model: str, log: Log) -> None:
    """Record from now on, if the environment names a folder; remove what ended processes of the model left there.

    Where the folder cannot be used, nothing is recorded.
    """
    global _ring, _file
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for file in (*Path(folder).glob(f"{model}.*{SUFFIX}"), *Path(folder).glob(f"{model}.*{_UNFINISHED}")):
            ring = file.with_suffix(SUFFIX)
            if model_of(ring) == model and not is_written(ring):
                file.unlink(missing_ok=True)
        _file = Path(folder) / f"{model}.{os.getpid()}{SUFFIX}"
        _ring = Ring(_file)
    except OSError as error:
        log(f"nothing is recorded for `shapeshift live`: {error}")


def record(kind: str, **values: Any) -> None:
    """Record what happened just now. Does nothing where no ring is open."""
    # `close_ring` may run meanwhile.
    if (ring := _ring) is not None:
        ring.write(kind, values)


def record_rows(kind: str, rows: Iterable[Any]) -> None:
    """Record rows, as many in a record as fit."""
    if (ring := _ring) is not None:
        ring.write_rows(kind, rows)


def wants_requests() -> bool:
    """Whether a reader has asked for a record of each request."""
    return (ring := _ring) is not None and ring.wants_requests


def is_recording() -> bool:
    """Whether a ring is open: what is dear to compute for a record need not be computed without."""
    return _ring is not None


def close_ring() -> None:
    """Record no more, and remove the file; who reads it keeps what it holds."""
    global _ring
    _ring = None
    if _file is not None:
        _file.unlink(missing_ok=True)


def model_of(file: Path) -> str:
    """The model whose ring this file is."""
    return file.name.removesuffix(SUFFIX).rpartition(".")[0]


def is_written(file: Path) -> bool:
    """Whether the process whose ring this file is still runs here."""
    pid = file.name.removesuffix(SUFFIX).rpartition(".")[2]
    return Path(f"/proc/{pid}").exists()
