"""Fronts of the backend token_adapt: an engine for each gamma."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapeshift import files, settings
from shapeshift.build_engines import starter
from shapeshift.build_engines.image.plan import (
    EmulatedFrontConfig,
    ImageFrontConfig,
    ImagePlan,
    built_gammas,
    compiled,
    is_current,
    plan,
    tasks_folder,
)
from shapeshift.build_engines.model_folder import BUILT, UP_TO_DATE, write_front
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines import device_plan, manifest
from shapeshift.errors import InvalidInputError
from shapeshift.progress import ProgressCallback
from shapeshift.registry import require_folder
from shapeshift.settings import require
from shapeshift.token_adapt.model import emulated
from shapeshift.token_adapt.model import manifest as image_manifest
from shapeshift.token_adapt.model.manifest import ImageManifest
from shapeshift.token_adapt.settings import (
    EMULATED,
    EmulatedSettings,
    ImageEngineSettings,
    TokenAdaptSettings,
    signature,
)
from shapeshift.token_adapt.tasks import copies, registry
from shapeshift.token_adapt.tasks.folder import CLASSIFIER, TASK_FILE, read_object
from shapeshift.token_adapt.tasks.folder import check as check_task
from shapeshift.triton import model_config

BACKEND = "token_adapt"


def read(folder: Path, config: Any, values: Mapping[str, str]) -> ImageFrontConfig | EmulatedFrontConfig:
    """The front in `folder`. Raises InvalidInputError naming the field."""
    serving = settings.read(TokenAdaptSettings, values)
    completed = model_config.complete(config, signature(values))
    engine, emulation = settings.names(ImageEngineSettings), settings.names(EmulatedSettings)
    if values.get("provider") == EMULATED:
        unfit = {f"does not go with provider {EMULATED}, which runs no model": engine}
        settings.refuse_unknown(values, emulation | settings.names(TokenAdaptSettings), unfit)
        return EmulatedFrontConfig(folder.name, folder, completed, settings.read(EmulatedSettings, values), serving)
    unfit = {f"goes with provider {EMULATED} only": emulation}
    settings.refuse_unknown(values, engine | settings.names(TokenAdaptSettings), unfit)
    return ImageFrontConfig(folder.name, folder, completed, settings.read(ImageEngineSettings, values), serving)


def check_emulated(front: EmulatedFrontConfig, paths: BuildPaths) -> emulated.EmulatedImageModel:
    """The described model. Raises InvalidInputError for a description or a default task that is not valid."""
    model = emulated.read(front.folder / front.settings.profile_file)
    _require_task(front.serving.task, model.tasks)
    return model


def check(front: ImageFrontConfig, paths: BuildPaths) -> ImagePlan:
    """What to build.

    Raises InvalidInputError for a tasks_dir that is no folder, or a default task that is not served.
    """
    tasks_dir, setting = tasks_folder(front, paths), require_folder("tasks_dir", front.serving.tasks_dir)
    require(not setting or tasks_dir.is_dir(), "tasks_dir", setting, f"a folder: there is none at {tasks_dir}")
    planned = plan(front, paths)
    started = _registry_of(planned, paths)
    source = started.source()
    if source is None:
        names = {check_task(read_object(path / TASK_FILE))[0] for path in started.starters}
    else:
        names = {entry.name for entry in registry.read(source)}
    planned = replace(planned, gammas=built_gammas(front, planned.described, bool(names)))
    classifier = [CLASSIFIER] if planned.described.classifier else []
    _require_task(front.serving.task, [*classifier, *names])
    return planned


def publish_emulated(front: EmulatedFrontConfig, paths: BuildPaths) -> str:
    """Check the description and write the model's folder. Returns a summary line."""
    file, target = front.folder / front.settings.profile_file, paths.generated / front.name
    model = check_emulated(front, paths)
    summary = f"emulated: gammas {', '.join(map(str, model.gammas))}, tasks {', '.join(model.tasks)}"
    write_front(front.folder, front.config, target, {"profile_file": paths.portable(file, target)}, summary)
    return summary


def publish(front: ImageFrontConfig, paths: BuildPaths, progress: ProgressCallback) -> tuple[ImageManifest, str]:
    """Build the engines unless they are current, and write the model's folder.

    Returns the manifest, and how the engines were made. Raises as `check`.
    """
    planned = check(front, paths)
    planned.tasks_dir.mkdir(parents=True, exist_ok=True)
    target = paths.engines / front.name
    with _registry_of(planned, paths).prepared() as (tasks_dir, moved):
        # Their images verify engines.
        planned = replace(planned, tasks_dir=tasks_dir)
        how = UP_TO_DATE
        if not is_current(planned, target):
            _build(planned, target, progress)
            how = BUILT
        result = image_manifest.load(target)
        _write_folder(planned, target, result, paths)
    return result, how + moved


def _build(planned: ImagePlan, target: Path, progress: ProgressCallback) -> None:
    """Build the engines and move them to `target`, all or nothing."""
    # torch takes seconds to import; a build with nothing to do must not import it.
    from shapeshift.build_engines.image.engines import ImageEngineBuilder

    with files.replace_folder(target) as work:
        ImageEngineBuilder(planned, work, progress, compiled(planned, target)).build().save(work)


def _registry_of(planned: ImagePlan, paths: BuildPaths) -> starter.StartedRegistry:
    """The registry of the front's tasks, a new one with those of `starter_dir`."""
    serving = planned.front.serving

    def fits(entry: registry.TaskEntry) -> bool:
        with contextlib.suppress(InvalidInputError):
            return bool(read_object(entry.folder / TASK_FILE).get("backbone") == planned.checkpoint.sha256)
        return False

    return starter.StartedRegistry(
        planned.tasks_dir,
        lambda folder: [fits(entry) for entry in registry.read(folder)],
        starter.sources(serving.starter_dir, TASK_FILE, paths),
        copies.take,
        stays=bool(serving.tasks_dir),
    )


def served(result: ImageManifest) -> str:
    """What answers requests: vectors, the checkpoint's own classifier, and registered tasks."""
    merged = [f"{entry.cosine:.3f} at {entry.gamma}" for entry in result.engines if entry.gamma < 0]
    cosines = f" (cosine to gamma 0 of {result.vectors}: {', '.join(merged)})" if merged else ""
    labels = f"task {CLASSIFIER}, {len(result.labels)} labels, " if result.labels else ""
    return f"{result.family}: vectors of {result.features} numbers{cosines}, {labels}and registered tasks"


def _require_task(task: str, registered: Collection[str]) -> None:
    names = ", ".join(sorted(registered)) or "no task yet"
    require(not task or task in registered, "task", task, f"a registered task, or left out; registered: {names}")


def _write_folder(planned: ImagePlan, engines: Path, result: ImageManifest, paths: BuildPaths) -> None:
    """Write the model's folder, with every `auto` replaced by the plan's choice."""
    front = planned.front
    target = paths.generated / front.name
    parameters = {
        "checkpoint": paths.portable(planned.checkpoint.folder, target),
        "provider": result.provider,
        "precision": result.precision,
        "threads": str(result.threads),
        "engines": paths.portable(engines, target),
        "manifest_sha256": manifest.sha256(engines),
        "checkpoint_sha256": result.checkpoint_sha256,
        "checkpoint_name": front.settings.checkpoint,
        "profile": json.dumps(image_manifest.profile(result)),
        **({"similarity": json.dumps(result.similarity)} if result.similarity else {}),
        "tasks_dir": paths.portable(tasks_folder(front, paths), target),
        **device_plan.of_engines(result.provider, result.device_mb, result.files),
    }
    summary = f"engines: {result.provider}, {result.precision}, {result.threads} threads; {result.tolerance}"
    summary += f"; {served(result)}"
    write_front(front.folder, front.config, target, parameters, summary, device=planned.device)
