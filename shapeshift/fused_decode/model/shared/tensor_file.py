"""Tensors in a file that processes map: whoever reads them, their pages are in memory once.

The data of each tensor begins on a page. Behind the last one come a JSON object, its length in 8 bytes, and a mark.
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
_FOOT = _LENGTH_BYTES + len(_MARK)
_TYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8)}


@dataclass(frozen=True)
class TensorFile:
    """The content of a file; notes: what its writer gave, as JSON."""

    tensors: Mapping[str, torch.Tensor]
    notes: Mapping[str, Any]


class TensorFileWriter:
    """Writes the file `path`, which is whole after `finish`. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._digest = hashlib.sha256()
        self._entries: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Write a tensor; returns the same tensor over the pages of the file."""
        start = self._file.tell()
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        padding = bytes(-len(data) % mmap.PAGESIZE)
        for part in (data, padding):
            self._file.write(part)
            self._digest.update(part)
        self._file.flush()
        self._entries[name] = [start, str(tensor.dtype), list(tensor.shape)]
        return _tensor(_mapped(self._file.fileno(), len(data), start), 0, *self._entries[name][1:])

    def finish(self, notes: Mapping[str, Any]) -> None:
        """Write what makes the file whole, and close it."""
        data = {"bytes": self._file.tell(), "sha256": self._digest.hexdigest()}
        content = {"tensors": self._entries, "notes": notes, **data}
        text = json.dumps(content).encode()
        self._file.write(text + len(text).to_bytes(_LENGTH_BYTES, "little") + _MARK)
        self.close()

    def close(self) -> None:
        """Close the file, whole or not. The tensors that `add` gave stay valid."""
        self._file.close()


def read(path: Path) -> TensorFile:
    """The tensors of a file, over its pages: a process that writes to one gets a page of its own.

    Raises OSError, and ValueError for a file that is not whole, or whose data are not those that were written.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= _FOOT:
            raise ValueError("it is cut short")
        held = _mapped(file.fileno(), size, 0)
    length, mark = int.from_bytes(held[-_FOOT : -len(_MARK)], "little"), held[-len(_MARK) :]
    if mark != _MARK or length > size - _FOOT:
        raise ValueError("it is cut short, or of another form")
    content = json.loads(held[size - _FOOT - length : -_FOOT])
    with memoryview(held) as whole, whole[: content["bytes"]] as data:
        if content["bytes"] != size - _FOOT - length or hashlib.sha256(data).hexdigest() != content["sha256"]:
            raise ValueError("its data are damaged")
    tensors = {name: _tensor(held, *entry) for name, entry in content["tensors"].items()}
    return TensorFile(tensors, content["notes"])


def _mapped(descriptor: int, length: int, start: int) -> mmap.mmap:
    # Writable, since torch takes no other memory; no write reaches the file.
    return mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start)


def _tensor(held: mmap.mmap, start: int, dtype: str, shape: list[int]) -> torch.Tensor:
    kind = _TYPES[dtype]
    count = torch.Size(shape).numel()
    return torch.frombuffer(held, dtype=kind, count=count, offset=start).view(shape)
