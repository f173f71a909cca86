"""Front models that are a cascade: nothing is compiled for them, their levels are models of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.published import write_front
from build_engines.settings import Places
from shapeshift import settings
from shapeshift.cascade import registry
from shapeshift.cascade.first_level import checked
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.engines.manifest import FILE_NAME as MANIFEST_FILE
from shapeshift.errors import NotFoundError

BACKEND = "cascade"


@dataclass(frozen=True)
class CascadeFront:
    """A folder of the model repository whose model is a cascade."""

    name: str
    folder: Path
    config: Any
    settings: CascadeSettings


def read(folder: Path, config: Any, values: Mapping[str, str]) -> CascadeFront:
    """The front model in `folder`; errors name the field."""
    settings.refuse_unknown(values, settings.names(CascadeSettings))
    return CascadeFront(folder.name, folder, config, settings.read(CascadeSettings, values))


def publish(front: CascadeFront, places: Places) -> str:
    """Hold the candidates against the levels' engines, write the model's folder; a line that says what it is.

    Raises NotFoundError for a task without candidates, EngineError for a table that does not match its checkpoints.
    """
    own = front.settings
    folder = find_candidates(front, places)
    chosen = registry.chosen(folder, own.task)
    levels = chosen.candidate.levels
    for number, model in enumerate(levels):
        # A later level may be a model of another backend.
        if number == 0 or (places.engines / model / MANIFEST_FILE).is_file():
            checked(places.engines / model, chosen.table, chosen.candidate, number)
    target = places.generated / front.name
    stated = {"candidates_dir": places.stated(folder, target), "engines_dir": places.stated(places.engines, target)}
    about = f"task {own.task}, candidate {chosen.candidate.name}: {', then '.join(levels)}"
    write_front(front.folder, front.config, target, stated, about)
    return about


def levels(front: CascadeFront, places: Places) -> tuple[str, ...]:
    """The models of the chosen candidate. Raises NotFoundError for a task without candidates."""
    return registry.chosen(find_candidates(front, places), front.settings.task).candidate.levels


def find_candidates(front: CascadeFront, places: Places) -> Path:
    """The folder that `candidates_dir` names. Raises NotFoundError with every place that was looked at."""
    name = front.settings.candidates_dir
    candidates = [front.folder / name, *(place / name for place in places.checkpoints)]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    raise NotFoundError(f"candidates_dir: no folder {', '.join(map(str, candidates))}")
