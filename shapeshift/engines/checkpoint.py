"""Model checkpoints in folders: read from safetensors only, identified by a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.files import RememberedHashes, file_sha256

_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
# The same weights once more, under the names of another library.
_DUPLICATES = "consolidated*.safetensors"
HASHES = "hashes.json"
"""The file of the build folder that remembers the hashes of weights, beside the folder of compiled kernels."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with config.json, tokenizer.json and safetensors weights.

    origin: the repository and commit of a hub that it comes from, owner/model@commit; empty: none.
    """

    folder: Path
    config: dict[str, Any]
    sha256: str
    origin: str = ""

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"


def find_folder(name: str, search: Sequence[Path] = ()) -> Path | None:
    """The folder `name`: a path, or below one of `search`. None if there is none."""
    return next((folder.resolve() for folder in _candidates(name, search) if folder.is_dir()), None)


def not_found(name: str, search: Sequence[Path] = ()) -> NotFoundError:
    """The error for a checkpoint that is no folder; it lists those that `find_folder` tries."""
    searched = ", ".join(map(str, _candidates(name, search)))
    return NotFoundError(f"checkpoint: no folder {searched}; give a folder, or a hub id such as owner/model@revision")


def _candidates(name: str, search: Sequence[Path]) -> list[Path]:
    return [Path(name), *(folder / name for folder in search)]


def open_checkpoint(
    folder: Path,
    needed: Sequence[str] = ("config.json", "tokenizer.json"),
    origin: str = "",
    hashes: Path | None = None,
) -> Checkpoint:
    """Check `folder` and hash what an engine depends on: the `needed` files (config.json is one) and the weights.

    hashes: the file that remembers the hashes of weights; None: they are computed.
    Raises InvalidInputError for a missing file or shard, or weights in a format that can execute code.
    """
    for name in needed:
        if not (folder / name).is_file():
            raise InvalidInputError("checkpoint", str(folder), f"must hold {name}")
    _check_shards(folder)
    weights = weight_files(folder)
    if not weights:
        unsafe = sorted(path.name for path in folder.iterdir() if path.suffix in _UNSAFE_SUFFIXES)
        found = f"found only {', '.join(unsafe)}, which can execute code when read; " if unsafe else ""
        raise InvalidInputError(
            "checkpoint", str(folder), f"{found}weights must be *.safetensors (convert with safetensors)"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise InvalidInputError("checkpoint", str(folder / "config.json"), f"not JSON: {error}") from None
    digest, remembered = hashlib.sha256(), RememberedHashes(hashes)
    hashed = [(name, file_sha256(folder / name)) for name in needed]
    for name, own in [*hashed, *((path.name, remembered.sha256(path)) for path in weights)]:
        digest.update(f"{name}:{own}\n".encode())
    return Checkpoint(folder, config, digest.hexdigest(), origin)


def weights_sha256(folder: Path) -> tuple[str, ...]:
    """The hashes of the files of weights in `folder`, sorted; their names do not count."""
    return tuple(sorted(file_sha256(path) for path in weight_files(folder)))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, without copies of the same weights for another library."""
    whole = set(folder.glob("*.safetensors"))
    return sorted(whole - set(folder.glob(_DUPLICATES)) or whole)


def _check_shards(folder: Path) -> None:
    """Raise InvalidInputError for the first file that the index of sharded weights lists and `folder` lacks."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidInputError("checkpoint", str(index), "JSON with a weight_map; download it again") from None
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            allowed = f"must hold {missing[0]}, which {index.name} lists: the download is not complete"
            raise InvalidInputError("checkpoint", str(folder), allowed)
