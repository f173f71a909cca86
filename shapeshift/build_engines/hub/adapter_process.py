"""The process that gets one adapter which a request names: `python -m` this, see `main`.

It ends with the server that started it, is nice to it, and can write no file above its limit, whatever a hub sends.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from pathlib import Path

from shapeshift.adapter_cache.registry import store
from shapeshift.build_engines.hub import needed_files
from shapeshift.build_engines.hub.download import HubId, fetch
from shapeshift.child_process import at_end_of_input
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.serving.error_codes import code_name
from shapeshift.settings import require

_NICE = 10
_RECORD_BYTES = 1 << 20
_DIGESTS = {40: hashlib.sha1, 64: hashlib.sha256}


def main(name: str, most_bytes: int, record: Path, folders: list[Path]) -> dict[str, str]:
    """The folder of the adapter `name` and the hash of its two files, which have the hashes that a hub states.

    most_bytes: of a file; record: folder of `download.RECORD`; folders: where a name without an owner is looked for.
    Raises ShapeshiftError.
    """
    hub_id = HubId.parse(name)
    folder = _in_folders(name, most_bytes, folders) if hub_id is None else _of_hub(hub_id, most_bytes, record)
    return {"folder": str(folder), "sha256": store.digest(folder)}


def _in_folders(name: str, most_bytes: int, folders: list[Path]) -> Path:
    for root in folders:
        folder = root / store.check_name(name, "lora_name")
        if not folder.is_dir():
            continue
        for file in (folder / one for one in store.FILES):
            inside = file.resolve().is_relative_to(root.resolve())
            require(inside, "lora_name", name, f"an adapter whose files are in {root}: {file.name} is a link out of it")
            require(file.is_file(), "lora_name", name, f"a folder of {root} with {file.name}")
            size = file.stat().st_size
            require(size <= most_bytes, f"lora_name {name}: {file.name}", f"{size} bytes", f"at most {most_bytes}")
        return folder
    raise NotFoundError(f"lora_name: no adapter {name!r}; neither registered nor a folder of adapter_sources")


def _of_hub(hub_id: HubId, most_bytes: int, record: Path) -> Path:
    record.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes + _RECORD_BYTES, most_bytes + _RECORD_BYTES))
    folder = fetch(hub_id, needed_files.of_adapter, record, most_bytes).folder
    for name in store.FILES:
        _require_hash(hub_id, folder / name)
    return folder


def _require_hash(hub_id: HubId, file: Path) -> None:
    """Raise the error for a file that is not what the hub states. Its cache names files by their hashes: SHA-256, and
    for small ones that of Git; they may be links again, to what several repositories share under other names."""
    blob = file.parent / file.readlink() if file.is_symlink() else file
    require(len(blob.name) in _DIGESTS, f"hub id {hub_id}: {file.name}", blob.name, "a hub that states hashes of files")
    digest = _DIGESTS[len(blob.name)]()
    if len(blob.name) == 40:
        digest.update(f"blob {blob.stat().st_size}\0".encode())
    with blob.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != blob.name:
        # Both: else the cache would serve it.
        file.unlink()
        blob.unlink()
        allowed = f"the hash that the hub states, {blob.name}; what it sent is removed"
        raise InvalidInputError(f"hub id {hub_id}: {file.name}", digest.hexdigest(), allowed)


if __name__ == "__main__":
    os.nice(_NICE)
    at_end_of_input(lambda: os._exit(1))
    try:
        outcome = main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), list(map(Path, sys.argv[4:])))
    except ShapeshiftError as error:
        outcome = {"code": code_name(error), "error": str(error)}
    json.dump(outcome, sys.stdout)
