"""Tensors in a file that processes map: whoever reads them, their pages are in memory once.

The data of each tensor begins on a page. Behind the last one come a JSON object, the SHA-256 of all up to here, the
length of the object in 8 bytes, and a mark.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_MARK = b"shapeshift tensors, form 1"
_LENGTH_BYTES = 8
_FOOT = hashlib.sha256().digest_size + _LENGTH_BYTES + len(_MARK)
_TYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8)}


@dataclass(frozen=True)
class TensorFile:
    """The content of a file; notes: what its writer gave, as JSON."""

    tensors: Mapping[str, torch.Tensor]
    notes: Mapping[str, Any]


class TensorFileWriter:
    """Writes the file `path`, which is whole after `finish`. Raises OSError."""

    def __init__(self, path: Path) -> None:
        # Without a buffer, whose rest would be written once more by `close` after an error.
        self._file = path.open("w+b", buffering=0)
        self._digest = hashlib.sha256()
        self._entries: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Write a tensor; returns the same tensor over the pages of the file."""
        start = self._file.tell()
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        self._write(data)
        self._write(bytes(-len(data) % mmap.PAGESIZE))
        self._entries[name] = [start, str(tensor.dtype), list(tensor.shape)]
        return _tensor(_mapped(self._file.fileno(), len(data), start), 0, *self._entries[name][1:])

    def finish(self, notes: Mapping[str, Any]) -> None:
        """Write what makes the file whole, and close it."""
        text = json.dumps({"tensors": self._entries, "notes": notes}).encode()
        self._write(text)
        self._write(self._digest.digest() + len(text).to_bytes(_LENGTH_BYTES, "little") + _MARK)
        self.close()

    def close(self) -> None:
        """Close the file, whole or not. The tensors that `add` gave stay valid."""
        self._file.close()

    def _write(self, part: bytes | memoryview) -> None:
        self._digest.update(part)
        left = memoryview(part)
        while left:
            left = left[self._file.write(left) :]


def read(path: Path) -> TensorFile:
    """The tensors of a file, over its pages: a process that writes to one gets a page of its own.

    Raises OSError, and ValueError for a file that is not whole, or whose content is not what was written.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= _FOOT:
            raise ValueError("it is cut short")
        held = _mapped(file.fileno(), size, 0)
    length = int.from_bytes(held[-len(_MARK) - _LENGTH_BYTES : -len(_MARK)], "little")
    if held[-len(_MARK) :] != _MARK:
        raise ValueError("it is cut short, or of another form")
    with memoryview(held) as whole, whole[:-_FOOT] as written:
        if not held[-_FOOT:].startswith(hashlib.sha256(written).digest()) or length > len(written):
            raise ValueError("it is damaged")
        content = json.loads(bytes(written[len(written) - length :]))
    tensors = {name: _tensor(held, *entry) for name, entry in content["tensors"].items()}
    return TensorFile(tensors, content["notes"])


def _mapped(descriptor: int, length: int, start: int) -> mmap.mmap:
    # Writable, since torch takes no other memory; no write reaches the file.
    return mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start)


def _tensor(held: mmap.mmap, start: int, dtype: str, shape: list[int]) -> torch.Tensor:
    kind = _TYPES[dtype]
    count = torch.Size(shape).numel()
    return torch.frombuffer(held, dtype=kind, count=count, offset=start).view(shape)
