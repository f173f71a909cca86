"""The process that gets one adapter which a request names: `python -m` this, see `main`.

It ends with the server that started it, is nice to it, and can write no file above its limit, whatever a hub sends.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from shapeshift.adapter_cache.registry import store
from shapeshift.build_engines.hub import needed_files
from shapeshift.build_engines.hub.download import HubId, fetch
from shapeshift.build_engines.hub.stated_hashes import require_hashes
from shapeshift.child_process import at_end_of_input
from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.serving.error_codes import code_name
from shapeshift.settings import require

_NICE = 10
_RECORD_BYTES = 1 << 20


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
    # Also those that were in the cache before.
    require_hashes(str(hub_id), folder, store.FILES)
    return folder


if __name__ == "__main__":
    os.nice(_NICE)
    at_end_of_input(lambda: os._exit(1))
    try:
        outcome = main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), list(map(Path, sys.argv[4:])))
    except ShapeshiftError as error:
        outcome = {"code": code_name(error), "error": str(error)}
    json.dump(outcome, sys.stdout)
