"""Fronts of the backend cascade: their levels are other models, so nothing is compiled for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.build_engines.model_folder import write_front
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.cascade.candidates import registry
from shapeshift.cascade.first_level import check_engines
from shapeshift.cascade.settings import CascadeSettings, signature
from shapeshift.engines.manifest import FILE_NAME as MANIFEST_FILE
from shapeshift.errors import NotFoundError
from shapeshift.triton import model_config

BACKEND = "cascade"


@dataclass(frozen=True)
class CascadeFrontConfig:
    """A folder of the model repository for the backend cascade, and the settings in its config.pbtxt."""

    name: str
    folder: Path
    config: Any
    settings: CascadeSettings


def read(folder: Path, config: Any, values: Mapping[str, str]) -> CascadeFrontConfig:
    """The front in `folder`. Raises InvalidInputError naming the field."""
    settings.refuse_unknown(values, settings.names(CascadeSettings))
    completed = model_config.complete(config, signature(values))
    return CascadeFrontConfig(folder.name, folder, completed, settings.read(CascadeSettings, values))


def check(front: CascadeFrontConfig, paths: BuildPaths) -> tuple[registry.ServingCandidate, Any]:
    """The candidate that serves, and the completed configuration.

    Raises NotFoundError for a task without candidates, InvalidInputError for inputs that do not fit them.
    """
    chosen = registry.serving(candidates_folder(front, paths), front.settings.task)
    return chosen, model_config.complete(front.config, signature({}, pairs=chosen.table.pairs))


def publish(front: CascadeFrontConfig, paths: BuildPaths) -> str:
    """Check the candidates against the engines of the levels, and write the model's folder. Returns a summary line.

    Raises NotFoundError for a task without candidates, EngineError if the table does not match the checkpoints.
    """
    own = front.settings
    folder = candidates_folder(front, paths)
    chosen, config = check(front, paths)
    levels = chosen.candidate.levels
    for number, model in enumerate(levels):
        # A later level may belong to another backend, without engines of ours.
        if number == 0 or (paths.engines / model / MANIFEST_FILE).is_file():
            check_engines(paths.engines / model, chosen.table, chosen.candidate, number)
    target = paths.generated / front.name
    parameters = {
        "candidates_dir": paths.portable(folder, target),
        "engines_dir": paths.portable(paths.engines, target),
    }
    summary = f"task {own.task}, candidate {chosen.candidate.name}: {', then '.join(levels)}"
    write_front(front.folder, config, target, parameters, summary)
    return summary


def levels(front: CascadeFrontConfig, paths: BuildPaths) -> tuple[str, ...]:
    """The models of the chosen candidate. Raises NotFoundError for a task without candidates."""
    return registry.serving(candidates_folder(front, paths), front.settings.task).candidate.levels


def candidates_folder(front: CascadeFrontConfig, paths: BuildPaths) -> Path:
    """The folder that `candidates_dir` names. Raises NotFoundError listing every folder that was searched."""
    name = front.settings.candidates_dir
    candidates = [front.folder / name, *(folder / name for folder in paths.checkpoints)]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    raise NotFoundError(f"candidates_dir: no folder {', '.join(map(str, candidates))}")
