"""Model checkpoints: found in a folder or on the hub, read from safetensors only, identified by a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.errors import EngineError, InvalidInputError, NotFoundError
from shapeshift.files import RememberedHashes, file_sha256

_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]
# The same weights once more, under the names of another library.
_DUPLICATES = "consolidated*.safetensors"
HASHES = "hashes.json"
"""The file of the build folder that remembers the hashes of weights, beside the folder of compiled kernels."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with config.json, tokenizer.json and safetensors weights."""

    folder: Path
    config: dict[str, Any]
    sha256: str

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"


def find(name: str, search: Sequence[Path] = ()) -> Path:
    """The folder of checkpoint `name`: a path, a folder under one of `search`, or a hub id ("owner/model").

    Raises NotFoundError listing every folder that was searched.
    """
    candidates = [Path(name), *(folder / name for folder in search)]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    searched = ", ".join(str(candidate) for candidate in candidates)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise NotFoundError(f"checkpoint: no folder {searched}; give a folder or a hub id such as owner/model")
    return _download(name, searched)


def open_checkpoint(
    folder: Path, needed: Sequence[str] = ("config.json", "tokenizer.json"), hashes: Path | None = None
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
    return Checkpoint(folder, config, digest.hexdigest())


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


def _download(name: str, searched: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=[_DUPLICATES]))
    except ImportError:
        raise EngineError("checkpoint: a hub id needs huggingface_hub; run `pip install huggingface_hub`") from None
    except Exception as error:  # noqa: BLE001  the hub client raises many unrelated types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotFoundError(f"checkpoint: neither {searched} nor the hub has {name!r} ({reason})") from error
