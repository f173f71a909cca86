"""The folders that the build reads and writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BuildPaths:
    """root: the project; build: the build folder; repository: the model repository with the front models."""

    root: Path
    build: Path
    repository: Path

    @property
    def checkpoints(self) -> tuple[Path, Path]:
        """The folders in which checkpoints are searched for, in order."""
        return self.build / "checkpoints", self.root / "checkpoints"

    @property
    def engines(self) -> Path:
        return self.build / "engines"

    @property
    def generated(self) -> Path:
        """The model repository that the server loads."""
        return self.build / "repository"

    def portable(self, path: Path, folder: Path) -> str:
        """`path` as the config.pbtxt in `folder` names it: relative inside the project, which may be moved or mounted
        elsewhere; absolute outside.
        """
        path = path.resolve()
        inside = any(path.is_relative_to(top.resolve()) for top in (self.root, self.build))
        return os.path.relpath(path, folder.resolve()) if inside else str(path)
