"""The registered adapters: a folder with registry.json and a folder for each adapter; and vLLM's multi_lora.json."""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.errors import InvalidInputError, NotFoundError, listed
from shapeshift.registry import FILE, Content, Registry
from shapeshift.settings import require

FILES = ("adapter_config.json", "adapter_model.safetensors")
MULTI_LORA = "multi_lora.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_LISTED = 20
_PIECE = 1 << 18


@dataclass(frozen=True)
class Entry:
    """A registered adapter.

    folder  name of its folder in the registry
    sha256  hash of its files
    pinned  whether it stays loaded
    stamps  size and time in ns of each of `FILES` when they were hashed; as long as they are unchanged, so is the hash
    base    hash of the checkpoint that it was checked against; it fits this one whatever name its configuration states
    origin  repository and commit of a hub that it comes from, owner/adapter@commit; empty: none
    """

    folder: str
    sha256: str
    pinned: bool = False
    stamps: tuple[tuple[int, int], ...] = ()
    base: str = ""
    origin: str = ""


def check_name(name: str, field: str = "name") -> str:
    """`name` itself. Raises InvalidInputError for an invalid adapter name."""
    valid = _NAME.fullmatch(name) is not None and ".." not in name
    require(valid, field, name, "1 to 128 letters, digits, '.', '_' or '-', not '..', starting with a letter or digit")
    return name


def unknown_adapter(name: str, registered: list[str], field: str) -> NotFoundError:
    """The error for a name that is not registered; it lists registered names."""
    names = listed(sorted(registered), _MAX_LISTED) or "none"
    return NotFoundError(f"{field}: no adapter {name!r}; known: {names}")


def read(folder: Path) -> dict[str, Entry]:
    """The entries by name; none without a registry.json. Raises InvalidInputError for an invalid one."""
    return {name: _entry(name, fields) for name, fields in _registry(folder).read().entries.items()}


def digest(folder: Path, pause: Callable[[], None] = lambda: None) -> str:
    """The hash of an adapter's two files, in hexadecimal; `pause()` is called in between.

    Raises InvalidInputError if a file is unreadable.
    """
    combined = hashlib.sha256()
    for name in FILES:
        try:
            file_hash = hashlib.sha256()
            with (folder / name).open("rb") as stream:
                while piece := stream.read(_PIECE):
                    file_hash.update(piece)
                    pause()
            combined.update(f"{name}:{file_hash.hexdigest()}\n".encode())
        except OSError as error:
            raise InvalidInputError("adapter", str(folder), f"must hold a readable {name} ({error.strerror})") from None
    return combined.hexdigest()


def stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Size and modification time in ns of an adapter's two files; none if one is missing."""
    try:
        status = [(folder / name).stat() for name in FILES]
    except OSError:
        return ()
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in status)


def entry_folder(folder: Path, entry: Entry) -> Path:
    """The folder of a registered adapter. Raises InvalidInputError for a folder outside the registry."""
    inside = Path(entry.folder).name == entry.folder and entry.folder not in ("", ".", "..")
    inside_folder = folder / entry.folder
    inside = inside and inside_folder.resolve().parent == folder.resolve()
    require(inside, "folder", entry.folder, f"the name of a folder in {folder}")
    return inside_folder


def add(folder: Path, name: str, source: Path, pinned: bool, base: str = "", origin: str = "") -> Entry:
    """Copy the adapter in `source`, which the caller has checked, and register it; replaces one of the same name.

    base, origin: see `Entry`.
    """
    check_name(name)
    with _changing(folder) as content:
        with files.draft_of(folder / name) as staged:
            staged.mkdir()
            for file in FILES:
                shutil.copyfile(source / file, staged / file)
            sha256 = digest(staged)
            target = folder / f"{name}-{sha256[:12]}"
            # Putting the registry's file flushes the folder that holds both.
            files.flush_folder(staged)
            _replace(staged, target)
        entry = Entry(target.name, sha256, pinned, stamps(target), base, origin)
        _drop(folder, content, name, keep=entry.folder)
        content.entries[name] = asdict(entry)
    return entry


def _replace(staged: Path, target: Path) -> None:
    """Make `target` equal to `staged`; files of `target` that are equal already are not touched."""
    if not target.is_dir():
        staged.rename(target)
        return
    for file in FILES:
        # Servers reload a file that was replaced.
        if not ((target / file).is_file() and filecmp.cmp(staged / file, target / file, shallow=False)):
            (staged / file).replace(target / file)


def pin(folder: Path, name: str, pinned: bool) -> None:
    """Keep `name` loaded, or stop doing so. Raises NotFoundError."""
    with _changing(folder) as content:
        _require_registered(content, name)
        content.entries[name]["pinned"] = pinned


def remove(folder: Path, name: str) -> None:
    """Remove the entry of `name`; its files are deleted later. Raises NotFoundError."""
    with _changing(folder) as content:
        _require_registered(content, name)
        _drop(folder, content, name)


def _require_registered(content: Content, name: str) -> None:
    if name not in content.entries:
        raise unknown_adapter(name, list(content.entries), "name")


def _drop(folder: Path, content: Content, name: str, keep: str = "") -> None:
    """Remove the entry of `name`, and mark its folder for deletion unless it is `keep`."""
    old = content.entries.pop(name, None)
    _registry(folder).retire(content, None if old is None else old["folder"], keep)


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[Content]:
    """The content of registry.json, see `Registry.changing`; the files of entries removed a while ago are deleted.

    So is what a change that was killed has left: its draft, and a copy that no entry names.
    """
    registry = _registry(folder)
    with registry.changing() as content:
        entries = [_entry(name, fields) for name, fields in content.entries.items()]
        files.remove_drafts(folder)
        for copy in set(folder.glob(f"*-{'[0-9a-f]' * 12}")) - {folder / entry.folder for entry in entries}:
            with contextlib.suppress(InvalidInputError):
                if copy.name not in content.removed and digest(copy).startswith(copy.name[-12:]):
                    registry.retire(content, copy.name)
        yield content
        registry.sweep(content)


def _registry(folder: Path) -> Registry:
    return Registry(folder, "adapters")


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    check_name(name, f"{FILE} adapters")
    valid = (
        {"folder", "sha256"} <= fields.keys() <= {"folder", "sha256", "pinned", "stamps", "base", "origin"}
        and isinstance(fields["folder"], str)
        and isinstance(fields.get("stamps", []), list)
        and all(isinstance(fields.get(key, ""), str) for key in ("base", "origin"))
    )
    require(valid, f"{FILE} {name}", fields, "an object with folder, sha256, pinned, stamps, base and origin")
    recorded = tuple(tuple(one) if isinstance(one, list) else one for one in fields.get("stamps", []))
    base, origin = fields.get("base", ""), fields.get("origin", "")
    return Entry(fields["folder"], fields["sha256"], fields.get("pinned", False), recorded, base, origin)


# vLLM's multi_lora.json in a model's version folder names further adapters.


def read_multi_lora(version: Path) -> dict[str, Path]:
    """The adapters that the multi_lora.json in a version folder names; none without that file.

    Paths are absolute or relative to that folder. Raises InvalidInputError unless the file maps names to paths.
    """
    file = version / MULTI_LORA
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(MULTI_LORA, str(file), f"readable JSON ({error})") from None
    valid = isinstance(content, dict) and all(isinstance(path, str) for path in content.values())
    require(valid, MULTI_LORA, str(file), "an object of names and paths")
    return {check_name(name, MULTI_LORA): version / path for name, path in content.items()}


def multi_lora_text(adapters: Mapping[str, Path]) -> str:
    """The text of a multi_lora.json that names these adapters by absolute paths."""
    paths = {name: str(folder.absolute()) for name, folder in adapters.items()}
    return json.dumps(paths, indent=2) + "\n"
