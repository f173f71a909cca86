"""Whether the files in the cache of a hub's library are what the hub states."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from shapeshift.errors import InvalidInputError
from shapeshift.files import RememberedHashes

_GIT, _SHA256 = 40, 64
"""Digits of the hash of a small file, and of any other one."""


def require_hashes(hub_id: str, snapshot: Path, names: Iterable[str], hashes: Path | None = None) -> None:
    """Remove each file of a snapshot that is not what the hub states, or of which it states nothing.

    hashes: the file of `RememberedHashes`. Raises InvalidInputError for the first that was removed.
    """
    remembered, snapshot = RememberedHashes(hashes), snapshot.resolve()
    errors = [error for name in names if (error := _wrong(hub_id, snapshot, name, remembered)) is not None]
    if errors:
        raise errors[0]


def _wrong(hub_id: str, snapshot: Path, name: str, remembered: RememberedHashes) -> InvalidInputError | None:
    """The library links a file to one whose name is the hash; that may be a link, to what repositories share."""
    file, field = snapshot / name, f"hub id {hub_id}: {name}"
    if not file.is_symlink():
        return InvalidInputError(field, "no link", "HF_HOME where links can be: they say which hash the hub states")
    blob = Path(os.path.normpath(file.parent / file.readlink()))
    hashed = {_GIT: _git_hash, _SHA256: remembered.sha256}.get(len(blob.name))
    if hashed is not None and (digest := hashed(blob)) == blob.name:
        return None
    # All: else the cache would serve it. A name that the hub made up may lead out of it.
    for one in (blob.resolve(), blob, file):
        if one.is_relative_to(snapshot.parents[2]):
            one.unlink(missing_ok=True)
    if hashed is None:
        return InvalidInputError(field, blob.name, "a hub that states hashes of files; what it sent is removed")
    return InvalidInputError(field, digest, f"the hash that the hub states, {blob.name}; what it sent is removed")


def _git_hash(file: Path) -> str:
    digest = hashlib.sha1(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: digest).hexdigest()
