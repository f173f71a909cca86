"""Packed weights that processes share which serve one checkpoint: one of them packs, all map what it has written.

In the file the data of each tensor begins on a page. Behind the last one come a JSON object, the SHA-256 of all up to
here, the length of the object in 8 bytes, and a mark. Whoever maps it, its pages are in memory once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from shapeshift import files
from shapeshift.engines.gguf import tensors as gguf_tensors
from shapeshift.fused_decode import settings
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.model.assembly import WeightStore
from shapeshift.fused_decode.model.native_operations import NativeLinear, PackedWeight
from shapeshift.fused_decode.model.network import Linear
from shapeshift.serving.model_args import Log

_SUFFIX = ".weights"
_MARK = b"shapeshift tensors, form 1"
_LENGTH_BYTES = 8
_FOOT = hashlib.sha256().digest_size + _LENGTH_BYTES + len(_MARK)
_HUGE_PAGE = 2 << 20
_SHARE = 16
"""Zeros are written before the tensors, up to one byte for so many that are there."""
_TYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8)}
T = TypeVar("T")


@dataclass(frozen=True)
class WeightsKey:
    """What packed weights depend on.

    checkpoint  its SHA-256
    precision   of the weights, with group size and type of the computation
    layout      how they are read and packed, with the code and the CPU that do so
    """

    checkpoint: str
    precision: str
    layout: str

    def path(self, folder: Path) -> Path:
        """Where `folder` has the file."""
        return folder / f"{self._model}-{self.layout}{_SUFFIX}"

    def outdated(self, folder: Path) -> list[Path]:
        """Files of the same weights in other layouts."""
        return [path for path in folder.glob(f"{self._model}-*{_SUFFIX}") if path != self.path(folder)]

    @property
    def _model(self) -> str:
        return f"{self.checkpoint[:16]}-{self.precision}"


def key_of(checkpoint: str, precision: str, kernels: Path) -> WeightsKey:
    """The key for the code and the CPU of this process; kernels: the folder of the compiled kernels."""
    # The name of the library holds a hash of its sources, the compiler and the CPU.
    sources = [*sorted(Path(__file__).parent.rglob("*.py")), Path(settings.__file__), Path(gguf_tensors.__file__)]
    parts = [native_operations.library(kernels).name.encode(), *(source.read_bytes() for source in sources)]
    return WeightsKey(checkpoint, precision, hashlib.sha256(b"\0".join(parts)).hexdigest()[:16])


def shared_weights(key: WeightsKey, folder: Path, log: Log, build: Callable[[WeightStore], T]) -> T:
    """What `build` makes of the weights of `key`, in a file in `folder`: mapped if it is there, else packed and written
    first, under a lock.

    A file that is damaged is made again. Where it cannot be written, the weights are this process' own. Both are
    logged.
    """
    path = key.path(folder)
    mapped = _open(path, log)
    if mapped is not None:
        return build(mapped)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.exclusive_lock(path.with_suffix(".lock")))
            # Another process may have made it meanwhile.
            mapped = _open(path, lambda line: None)
            writing = None if mapped else _Writing(path, log)
        except OSError as error:
            log(f"packed weights are not shared: {error}")
            return build(WeightStore())
        if writing is not None:
            try:
                built = build(writing)
                writing.publish(key.outdated(folder))
            finally:
                writing.close()
            # Once more, as every later process does: over one mapping, whose pages are huge where they can be.
            mapped = _open(path, log) if writing.is_published else None
        return built if mapped is None else build(mapped)


def _open(path: Path, log: Log) -> WeightStore | None:
    """The weights in the file `path`; None where it has to be made."""
    try:
        return _Mapped(read(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log(f"packed weights are made again: {path.name}: {error}")
        return None


class _Mapped(WeightStore):
    """See `assembly.WeightStore`: nothing is made."""

    def __init__(self, held: TensorFile) -> None:
        self._held = held

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        kind, sizes, parts = self._held.notes[name]
        return NativeLinear.of(PackedWeight(kind, tuple(sizes), {part: self.table(f"{name}.{part}") for part in parts}))

    def table(self, name: str, make: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
        return self._held.tensors[name]


class _Writing(WeightStore):
    """See `assembly.WeightStore`: all is made, written to a draft beside `path`, and mapped from there."""

    def __init__(self, path: Path, log: Log) -> None:
        self._path, self._log = path, log
        # One name, so that what a killed process has left goes; never written over, since a process may still map it.
        self._draft = path.with_name(f".{path.name}")
        self._draft.unlink(missing_ok=True)
        self._writer: TensorFileWriter | None = TensorFileWriter(self._draft)
        self._notes: dict[str, object] = {}
        self.is_published = False

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        linear = make()
        assert isinstance(linear, NativeLinear), "only packed linears are shared"
        weight = linear.weight
        self._notes[name] = weight.kind, weight.sizes, [*weight.tensors]
        parts = {part: self._written(f"{name}.{part}", tensor) for part, tensor in weight.tensors.items()}
        return NativeLinear.of(PackedWeight(weight.kind, weight.sizes, parts))

    def table(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._written(name, make())

    def _written(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._writer is None:
            return tensor
        try:
            return self._writer.add(name, tensor)
        except OSError as error:
            self._log(f"packed weights are not shared: {error}")
            self.close()
            return tensor

    def publish(self, outdated: list[Path]) -> None:
        """Give the file its name, and remove those that nobody needs any more; who maps them keeps them."""
        if self._writer is None:
            return
        try:
            self._writer.finish(self._notes)
            self._draft.replace(self._path)
            self.is_published = True
            for path in outdated:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._log(f"packed weights are not shared: {error}")

    def close(self) -> None:
        """Remove what was not published."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        with contextlib.suppress(OSError):
            self._draft.unlink(missing_ok=True)


@dataclass(frozen=True)
class TensorFile:
    """The content of a file; notes: what its writer gave, as JSON."""

    tensors: Mapping[str, torch.Tensor]
    notes: Mapping[str, Any]


class TensorFileWriter:
    """Writes the file `path`, which is whole after `finish`. Raises OSError.

    Pages that the kernel gets for one write lie side by side in memory, up to a huge page. So zeros are written first,
    a huge page at once: of tensors one after another most pages would be small, and a token take up to 8% longer.

    The more is there, the more zeros. Tensors over the same ones share a mapping, since each takes a file descriptor:
    experts have thousands of tensors.
    """

    def __init__(self, path: Path) -> None:
        # Without a buffer, whose rest would be written once more by `close` after an error.
        self._file = path.open("w+b", buffering=0)
        self._digest = hashlib.sha256()
        self._entries: dict[str, Any] = {}
        self._reserved = 0
        self._held: mmap.mmap | None = None
        self._first = 0

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Write a tensor; returns the same tensor over the pages of the file."""
        start = self._file.tell()
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        self._write(data)
        self._write(bytes(-len(data) % mmap.PAGESIZE))
        self._entries[name] = [start, str(tensor.dtype), list(tensor.shape)]
        if self._held is None or start + len(data) > self._first + len(self._held):
            # In Linux it shows what is written later, too.
            end = max(start + len(data), self._reserved)
            self._held, self._first = _mapped(self._file.fileno(), end - start, start), start
        return _tensor(self._held, start - self._first, *self._entries[name][1:])

    def finish(self, notes: Mapping[str, Any]) -> None:
        """Write what makes the file whole, and close it."""
        text = json.dumps({"tensors": self._entries, "notes": notes}).encode()
        self._write(text)
        self._write(self._digest.digest() + len(text).to_bytes(_LENGTH_BYTES, "little") + _MARK)
        self._file.truncate()
        self.close()

    def close(self) -> None:
        """Close the file, whole or not. The tensors that `add` gave stay valid."""
        self._file.close()

    def _write(self, part: bytes | memoryview) -> None:
        self._digest.update(part)
        left = memoryview(part)
        end = self._file.tell() + len(left)
        # Where there is no room for them, the tensors may fit.
        with contextlib.suppress(OSError):
            target = end + end // _SHARE if end > self._reserved else 0
            while self._reserved < target:
                self._reserved += os.pwrite(self._file.fileno(), bytes(_HUGE_PAGE), self._reserved)
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
        # What is not in memory yet is read into huge pages.
        with contextlib.suppress(OSError):
            held.madvise(mmap.MADV_HUGEPAGE)
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
