"""One front model as `make engines` sees it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.engines.settings import TextEngineSettings
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.settings import PolymorphSettings


@dataclass(frozen=True)
class Places:
    """Where the build reads and writes; all under the project's root unless told otherwise."""

    root: Path
    build: Path
    repository: Path

    @property
    def checkpoints(self) -> tuple[Path, Path]:
        return self.build / "checkpoints", self.root / "checkpoints"

    @property
    def engines(self) -> Path:
        return self.build / "engines"

    @property
    def generated(self) -> Path:
        return self.build / "repository"

    def stated(self, path: Path, target: Path) -> str:
        """How the model's folder `target` in the generated repository names `path`.

        Relative to itself where that lies within the project, which may be moved, or mounted elsewhere.
        """
        path = path.resolve()
        inside = any(path.is_relative_to(folder.resolve()) for folder in (self.root, self.build))
        return os.path.relpath(path, target.resolve()) if inside else str(path)


@dataclass(frozen=True)
class FrontModel:
    """A folder of the model repository: its parsed config.pbtxt and the settings in it, of engines and of serving."""

    name: str
    folder: Path
    config: Any
    settings: TextEngineSettings
    serving: PolymorphSettings


def read_json(path: Path, field: str) -> Any:
    """The JSON in `path`; InvalidInputError naming the setting `field` where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(field, str(path), f"a readable file ({error.strerror})") from None
    except ValueError as error:
        raise InvalidInputError(field, str(path), f"JSON ({error})") from None
