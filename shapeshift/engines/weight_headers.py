"""Names, data types and shapes of a checkpoint's tensors, from the headers of its safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shapeshift.engines.checkpoint import require_content, weight_files
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

# Of weights; a buffer, such as the numbers of positions, may have whole numbers or truth values.
FLOATS = ("F64", "F32", "F16", "BF16")
_BUFFERS = ("I64", "BOOL")


@dataclass(frozen=True)
class Header:
    """The file of a tensor, its data type as safetensors names it, and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read(folder: Path) -> dict[str, Header]:
    """The tensors of the checkpoint in `folder`. Raises as `read_file`."""
    return {name: header for file in weight_files(folder) for name, header in read_file(file).items()}


def read_file(file: Path) -> dict[str, Header]:
    """The tensors in a file. Raises InvalidInputError for one that is not whole."""
    from safetensors import SafetensorError, safe_open

    require_content(file)
    headers = {}
    try:
        with safe_open(str(file), framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118  not a mapping
                piece = opened.get_slice(name)
                headers[name] = Header(file, str(piece.get_dtype()), tuple(piece.get_shape()))
    except (SafetensorError, OSError) as error:
        allowed = f"a whole safetensors file ({error}); download it again"
        raise InvalidInputError("checkpoint", str(file), allowed) from None
    return headers


def require_floats(headers: Mapping[str, Header]) -> None:
    """Raise InvalidInputError for the first tensor in a quantised data type, which would be read as plain numbers."""
    for name, header in headers.items():
        allowed = f"{', '.join(FLOATS)} in {header.file}; use the checkpoint that is not quantised"
        require(header.dtype in (*FLOATS, *_BUFFERS), f"dtype of {name}", header.dtype, allowed)
