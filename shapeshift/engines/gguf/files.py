"""Reads the header of a GGUF file, or of the parts of a split one: metadata and the table of tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from shapeshift.engines.checkpoint import require_content
from shapeshift.errors import InvalidInputError, listed
from shapeshift.settings import require

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_LISTED = 5
Name = TypeVar("Name", bound=PurePath)


@dataclass(frozen=True)
class Stored:
    """A tensor: its file, its type as GGUF calls it, the offset of its first byte, and its shape, outputs first."""

    file: Path
    kind: str
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Gguf:
    """What a model's files hold.

    metadata  values by key: numbers, texts, truth values, and lists of these
    tensors   by the name that GGUF has for them
    """

    files: Sequence[Path]
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def chosen(files: Sequence[Name], variant: str = "") -> list[Name]:
    """All parts of the model among `files` whose name has `variant` between dashes or dots; empty: of the only one.

    None where there is no such file. Raises InvalidInputError for several models, of which one has to be named.
    """
    models: dict[str, list[Name]] = {}
    for file in sorted(files):
        part = _PART.fullmatch(file.name)
        stem = part[1] if part else file.stem
        if not variant or variant.lower() in re.split(r"[.-]", stem.lower()):
            models.setdefault(stem, []).append(file)
    allowed = f"one GGUF model: name its file, or owner/model:VARIANT of a hub ({listed(sorted(models), _MOST_LISTED)})"
    require(len(models) < 2, "checkpoint", variant or f"{len(models)} GGUF models", allowed)
    return next(iter(models.values()), [])


def parts_of(file: Path) -> list[Path]:
    """All files of the model that `file` is a part of, in order. Raises InvalidInputError for one that is missing."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    paths = [file.with_name(f"{match[1]}-{part:05}-of-{match[3]}.gguf") for part in range(1, int(match[3]) + 1)]
    for path in paths:
        require(path.is_file(), "checkpoint", str(path), "a file: the model is split, and this part is missing")
    return paths


def read(file: Path) -> Gguf:
    """The header of a model's files; no tensor is read.

    Raises InvalidInputError for a file that is not GGUF, cut short, of a type that `gguf` does not know, or one part of
    a split model without the others.
    """
    paths = parts_of(file)
    metadata: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    for path in paths:
        more, stored = _read(path)
        metadata = {**more, **metadata}
        tensors |= stored
    count = metadata.get("split.tensors.count", len(tensors))
    complete = count == len(tensors) and metadata.get("split.count", len(paths)) in (0, len(paths))
    require(complete, "checkpoint", str(file), f"all parts of the split model: it has {count} tensors")
    return Gguf(paths, metadata, tensors)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    # The package is needed to build a model from a GGUF file, and to serve one.
    from gguf import GGUFReader

    require_content(path)
    with path.open("rb") as opened:
        require(opened.read(len(_MAGIC)) == _MAGIC, "checkpoint", str(path), "a GGUF file; download it again")
    size = path.stat().st_size
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            str(tensor.name): Stored(path, tensor.tensor_type.name, int(tensor.data_offset), _shape(tensor))
            for tensor in reader.tensors
        }
        end = max((int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors), default=0)
    except Exception as error:  # noqa: BLE001  the package raises whatever NumPy does for a file that is cut short
        allowed = f"a whole GGUF file of types that gguf knows ({error}); download it again"
        raise InvalidInputError("checkpoint", str(path), allowed) from None
    require(end <= size, "checkpoint", str(path), f"a whole file: {end} bytes, of which {size} are there")
    return metadata, tensors


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))
