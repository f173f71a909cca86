"""What `starter_dir` names: a folder with the adapters or tasks that the registry of a front model has at first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from shapeshift.build_engines.paths import BuildPaths
from shapeshift.errors import NotFoundError
from shapeshift.registry import FILE


def sources(starter_dir: str, has: str, paths: BuildPaths) -> list[Path]:
    """The folders in `starter_dir` that have the file `has`; none where it is empty. Raises NotFoundError."""
    if not starter_dir:
        return []
    candidates = [paths.root / starter_dir, *(folder / starter_dir for folder in paths.checkpoints)]
    for candidate in candidates:
        if candidate.is_dir():
            return sorted(file.parent for file in candidate.glob(f"*/{has}"))
    raise NotFoundError(f"starter_dir: no folder {', '.join(map(str, candidates))}; name one, or leave it out")


def fill(folder: Path, fits: Collection[bool], starters: Collection[Path], add: Callable[[Path], object]) -> str:
    """Add `starters` to the registry in `folder` if there is none.

    fits: for each entry, whether it fits the checkpoint. Where none does, the registry moves aside before: its entries
    may be the user's own. Returns what was moved, for the summary.
    """
    moved = ""
    if starters and fits and not any(fits):
        aside = folder.with_name(f"{folder.name}.of_another_base")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        moved = f" ({len(fits)} of another base model moved to {aside})"
    if not (folder / FILE).exists():
        for source in starters:
            add(source)
    return moved
