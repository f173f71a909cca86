"""The registry of adapters or tasks of a front model: it has those of `starter_dir` at first, and gives way to that of
another checkpoint.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from shapeshift import files
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.errors import NotFoundError
from shapeshift.registry import FILE

_ASIDE = ".of_another_base"


def sources(starter_dir: str, has: str, paths: BuildPaths) -> list[Path]:
    """The folders in `starter_dir` that have the file `has`; none where it is empty. Raises NotFoundError."""
    if not starter_dir:
        return []
    candidates = [paths.root / starter_dir, *(folder / starter_dir for folder in paths.checkpoints)]
    for candidate in candidates:
        if candidate.is_dir():
            return sorted(file.parent for file in candidate.glob(f"*/{has}"))
    raise NotFoundError(f"starter_dir: no folder {', '.join(map(str, candidates))}; name one, or leave it out")


@dataclass(frozen=True)
class StartedRegistry:
    """The registry in `folder`, for one checkpoint.

    fits(folder): for each entry of the registry in a folder, whether it fits the checkpoint
    starters: the folders of what a new registry has
    add(folder, starter): register one in the registry in a folder
    stays: whether the user names the folder, which then never moves
    """

    folder: Path
    fits: Callable[[Path], Collection[bool]]
    starters: Collection[Path]
    add: Callable[[Path, Path], object]
    stays: bool

    def source(self) -> Path | None:
        """Where the registry for the checkpoint is: in its folder, or aside; None: it is new and has the starters."""
        entries: Collection[bool] = ()
        if not self.stays:
            entries = self.fits(self.folder)
            if any(entries):
                return self.folder
            asides = sorted(self.folder.parent.glob(f"{glob.escape(self.folder.name + _ASIDE)}*"))
            aside = next((aside for aside in asides if any(self.fits(aside))), None)
            if aside is not None:
                return aside
        is_new = entries or not (self.folder / FILE).exists()
        return None if self.starters and is_new else self.folder

    @contextlib.contextmanager
    def prepared(self) -> Iterator[tuple[Path, str]]:
        """The folder that holds the registry meanwhile, and what moves, for the summary.

        At the end, unless there is an error, it moves to its folder. A registry there without an entry that fits moves
        aside, where it stays until one fits again: the entries may be the user's own.
        """
        source = self.source()
        if source == self.folder:
            yield self.folder, ""
            return
        # The folder of a user's registry may be a file system of its own.
        with files.draft_of(self.folder / "new" if self.stays else self.folder) as draft:
            if source is None:
                draft.mkdir(parents=True)
                for starter in self.starters:
                    self.add(draft, starter)
            aside = self._next_aside()
            count = 0 if self.stays else len(self.fits(self.folder))
            moves = [f"{count} of another base model moved to {aside}"] if count else []
            moves += [f"back from {source}"] if source else []
            yield source or draft, f" ({', '.join(moves)})" if moves else ""
            if self.stays:
                self._take_in(draft)
            else:
                if self.folder.is_dir() and any(self.folder.iterdir()):
                    self.folder.rename(aside)
                (source or draft).rename(self.folder)
                files.flush(self.folder.parent)

    def _take_in(self, draft: Path) -> None:
        """Move what `draft` holds to the folder; registry.json last, so that it names what is there."""
        for path in sorted(draft.iterdir(), key=lambda path: path.name == FILE):
            # Folders are named by their hash.
            if not (self.folder / path.name).exists():
                path.rename(self.folder / path.name)
        files.flush(self.folder)

    def _next_aside(self) -> Path:
        first = self.folder.with_name(f"{self.folder.name}{_ASIDE}")
        further = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
        return next(path for path in itertools.chain([first], further) if not path.exists())
