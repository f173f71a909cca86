"""Fronts of the backend cascade: their levels are other models, so nothing is compiled for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.build_engines.model_folder import gpus_of, write_front
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.cascade import candidates, local_candidates
from shapeshift.cascade.settings import CascadeSettings, signature
from shapeshift.engines import device_plan, manifest
from shapeshift.engines.manifest import FILE_NAME as MANIFEST_FILE
from shapeshift.engines.providers import lookup
from shapeshift.errors import NotFoundError
from shapeshift.registry import require_folder
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


def check(front: CascadeFrontConfig, paths: BuildPaths) -> tuple[candidates.ServingCandidate, Any]:
    """The candidate that serves, and the completed configuration.

    Raises NotFoundError for a task without candidates, InvalidInputError for inputs that do not fit them.
    """
    chosen = candidates.serving(candidates_folder(front, paths), front.settings.task)
    return chosen, model_config.complete(front.config, signature({}, pairs=chosen.table.pairs))


def publish(front: CascadeFrontConfig, paths: BuildPaths) -> str:
    """Check the candidates against the engines of the levels, and write the model's folder. Returns a summary line.

    Raises NotFoundError for a task without candidates, EngineError if the table does not match the checkpoints.
    """
    profiled, config = check(front, paths)
    folder = _local_folder(front, paths, profiled)
    chosen = candidates.serving(folder, front.settings.task)
    levels = chosen.candidate.levels
    for number, model in enumerate(levels):
        # A later level may belong to another backend, without engines of ours.
        if number == 0 or _has_engines(paths, model):
            chosen.table.check_engines(paths.engines / model, model, model == levels[-1])
    target = paths.generated / front.name
    parameters = {
        "candidates_dir": paths.portable(folder, target),
        "engines_dir": paths.portable(paths.engines, target),
    }
    first = manifest.load(paths.engines / levels[0])
    gpus = lookup.usable(first.provider, gpus_of(front.folder))
    if gpus:
        parameters |= device_plan.of_engines(first.provider, first.device_mb, first.files)
    summary = f"task {front.settings.task}, candidate {chosen.candidate.name}: {', then '.join(levels)}"
    if "source" in chosen.table.origin:
        summary += f"; measured on another CPU, chosen anew in {folder}"
    write_front(front.folder, config, target, parameters, summary, device=next(iter(gpus), None))
    return summary


def _local_folder(front: CascadeFrontConfig, paths: BuildPaths, profiled: candidates.ServingCandidate) -> Path:
    """The folder of `profiled`, or for a table from another CPU one in `build/` measured here."""
    models = [one.name for one in profiled.table.models]
    engines = {name: manifest.load(paths.engines / name) for name in models if _has_engines(paths, name)}
    if not set(profiled.candidate.levels) <= set(engines) or not local_candidates.is_foreign(profiled.table, engines):
        return candidates_folder(front, paths)
    target = paths.checkpoints[0] / f"{front.name}_candidates"
    parts = [profiled.table.as_json(), profiled.candidate.name, *(engines[name].build_key for name in engines)]
    source = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if candidates.entries(target).get(profiled.table.task) is None or _source(target, profiled.table.task) != source:
        local = local_candidates.on_this_machine(profiled, engines, source)
        candidates.put(target, local.table, local.candidate.name, local.pinned)
    return target


def _source(folder: Path, task: str) -> object:
    return candidates.serving(folder, task).table.origin.get("source")


def _has_engines(paths: BuildPaths, model: str) -> bool:
    return (paths.engines / model / MANIFEST_FILE).is_file()


def levels(front: CascadeFrontConfig, paths: BuildPaths) -> tuple[str, ...]:
    """The models of the chosen candidate. Raises NotFoundError for a task without candidates."""
    return candidates.serving(candidates_folder(front, paths), front.settings.task).candidate.levels


def candidates_folder(front: CascadeFrontConfig, paths: BuildPaths) -> Path:
    """The folder that `candidates_dir` names. Raises NotFoundError listing every folder that was searched."""
    name = require_folder("candidates_dir", front.settings.candidates_dir)
    candidates = [front.folder / name, *(folder / name for folder in paths.checkpoints)]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    raise NotFoundError(f"candidates_dir: no folder {', '.join(map(str, candidates))}")
