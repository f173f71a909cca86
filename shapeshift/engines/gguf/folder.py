"""A GGUF model becomes a checkpoint folder: config.json, tokenizer and chat template beside links to its files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Set
from pathlib import Path

from shapeshift import files
from shapeshift.engines.checkpoint import weight_files
from shapeshift.engines.gguf import families
from shapeshift.engines.gguf.files import SUFFIX, chosen, parts_of, read
from shapeshift.engines.gguf.tensors import INDEX, write_index
from shapeshift.engines.gguf.tokenizer import tokenizer_files

_DIGITS = 12
"""Of the hash in the name of a folder."""


def file_in(folder: Path, variant: str = "") -> Path | None:
    """The first file of the GGUF model that `folder` holds in place of a checkpoint of transformers; None: none.

    variant: as for `files.chosen`. Raises InvalidInputError for several, of which one has to be named.
    """
    if (folder / INDEX).is_file() or (not variant and weight_files(folder)):
        return None
    return next(iter(chosen(list(folder.glob(f"*{SUFFIX}")), variant)), None)


def write(file: Path, top: Path) -> Path:
    """The checkpoint folder of the model in `file`, below `top`; it is written unless it is there already.

    Those of former contents of the file stay, see `remove_former`.
    Raises InvalidInputError as `files.read`, and for an architecture or a tokenizer that is not served.
    """
    parts = parts_of(file)
    folder = top / f"{file.stem}-{_key(parts)}"
    if folder.is_dir():
        return folder
    model = read(file)
    entries = families.entries_of(model)
    config = families.config_of(model, entries)
    contents = tokenizer_files(model.metadata)
    contents["config.json"] = json.dumps(config, indent=1)
    with files.replace_folder(folder) as work:
        for name, text in contents.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(text, encoding="utf-8")
        write_index(work, entries)
        for part in parts:
            (work / part.name).symlink_to(_target(part.resolve(), folder))
    return folder


def remove_former(top: Path, used: Set[Path]) -> None:
    """Remove the folders below `top` that `write` has made of the same files as one of `used`, but those in `used`."""
    folders = {folder.resolve(): _files_of(folder) for folder in top.glob(f"*-{'[0-9a-f]' * _DIGITS}")}
    used_files = {file for folder in used for file in folders.get(folder, ())}
    for folder in folders.keys() - used:
        if used_files & folders[folder]:
            shutil.rmtree(folder)


def _files_of(folder: Path) -> set[Path]:
    return {link.resolve() for link in folder.glob(f"*{SUFFIX}")}


def _target(part: Path, folder: Path) -> Path:
    """What the link in `folder` names: relative where both lie in the folder of checkpoints, which may be moved."""
    checkpoints = folder.resolve().parents[1]
    return Path("../..") / part.relative_to(checkpoints) if part.is_relative_to(checkpoints) else part


def _key(parts: list[Path]) -> str:
    """Changes with the files, and with the code that reads them."""
    stamps = [(str(part.resolve()), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    sources = [source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join([repr(stamps).encode(), *sources])).hexdigest()[:_DIGITS]
