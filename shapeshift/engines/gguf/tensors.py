"""The tensors of a checkpoint folder whose weights are GGUF files, by the names that its family has in transformers.

`folder.write` makes such a folder; INDEX, its table of tensors, spares a server the seconds that it takes to parse the
metadata of a GGUF file, which hold the vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

INDEX = "gguf.json"
"""The table of tensors in the folder of a checkpoint whose weights are GGUF files."""
GROUP = 32
"""Inputs of a block of LEVELS, which share a scale."""
LEVELS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "MXFP4": 8}
"""Bits of the quantised types that serve as they are: whole levels, with a scale, and with Q4_1 a minimum, of a block.
The numbers of MXFP4 are levels of 8 bits. The others are read as numbers."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    kind    its type, as GGUF calls it
    offset  of its first byte in the file
    shape   as in transformers: outputs, inputs
    heads   of queries or keys, where the file has the elements that rotate together side by side; 0: it is otherwise
    added   what the file has added to each value
    """

    file: str
    kind: str
    offset: int
    shape: tuple[int, ...]
    heads: int = 0
    added: float = 0.0


def write_index(folder: Path, entries: dict[str, Entry]) -> None:
    """Write the table of tensors of `folder`."""
    text = json.dumps({name: asdict(entry) for name, entry in entries.items()}, indent=0)
    (folder / INDEX).write_text(text, encoding="utf-8")


def is_gguf(folder: Path) -> bool:
    """Whether the weights of a checkpoint folder are GGUF files."""
    return (folder / INDEX).is_file()


def read_index(folder: Path) -> dict[str, Entry]:
    """The tensors of `folder`, by name; none where its weights are no GGUF files."""
    if not is_gguf(folder):
        return {}
    content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return {name: Entry(**{**fields, "shape": tuple(fields["shape"])}) for name, fields in content.items()}


def numbers(folder: Path, entry: Entry) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The tensor as numbers, FLOAT32 of its shape."""
    # Only models from GGUF files need the package.
    from gguf.quants import dequantize

    values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(_bytes(folder, entry), _kinds()[entry.kind])
    return _ordered(values.reshape(entry.shape), entry) - np.float32(entry.added)


def blocks(folder: Path, entry: Entry) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor as the file has it, with the outputs as in transformers: UINT8 [outputs, bytes]."""
    return _ordered(_bytes(folder, entry), entry)


def _ordered(values: np.ndarray[Any, Any], entry: Entry) -> np.ndarray[Any, Any]:
    """The outputs in the order of transformers, of a tensor whose heads have the elements that rotate side by side."""
    if not entry.heads:
        return values
    order = np.arange(entry.shape[0]).reshape(entry.heads, -1, 2).swapaxes(1, 2).reshape(-1)
    ordered: np.ndarray[Any, Any] = values[order]
    return ordered


def _bytes(folder: Path, entry: Entry) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from gguf.constants import GGML_QUANT_SIZES

    per_block, size = GGML_QUANT_SIZES[_kinds()[entry.kind]]
    rows, width = int(np.prod(entry.shape[:-1])), entry.shape[-1] // per_block * size
    return np.array(np.memmap(folder / entry.file, np.uint8, "r", entry.offset, (rows, width)))


def _kinds() -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType.__members__
