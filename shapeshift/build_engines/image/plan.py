"""What to build for an image front, with every `auto` resolved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shapeshift.build_engines.hub.sources import find_checkpoint
from shapeshift.build_engines.model_folder import provider_of
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines import hardware, manifest
from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.gpu import with_cpu
from shapeshift.engines.hardware import cores
from shapeshift.engines.interfaces import Provider
from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.files import HASHES, file_sha256
from shapeshift.token_adapt.checkpoints.description import Description, repooled
from shapeshift.token_adapt.checkpoints.reading import open_vision
from shapeshift.token_adapt.model import manifest as image_manifest
from shapeshift.token_adapt.settings import EmulatedSettings, ImageEngineSettings, TokenAdaptSettings
from shapeshift.token_adapt.tasks import examples, registry

# Incremented when a change of this project makes engines that were built before wrong or worse.
_BUILD_FORMAT = 5


@dataclass(frozen=True)
class ImageFrontConfig:
    """A folder of the model repository for the backend token_adapt, and the settings in its config.pbtxt."""

    name: str
    folder: Path
    config: Any
    settings: ImageEngineSettings
    serving: TokenAdaptSettings


@dataclass(frozen=True)
class EmulatedFrontConfig:
    """An image front that emulates the model described by its `profile_file`."""

    name: str
    folder: Path
    config: Any
    settings: EmulatedSettings
    serving: TokenAdaptSettings


@dataclass(frozen=True)
class ImagePlan:
    """An image front with every `auto` resolved.

    gammas: those that have engines; tasks_dir: the registry whose images verify engines that merge; gpus: those that
    the engines run on, none for the CPU.
    """

    front: ImageFrontConfig
    checkpoint: Checkpoint
    described: Description
    provider: Provider
    precision: str
    threads: int
    gammas: tuple[int, ...]
    tasks_dir: Path
    gpus: Sequence[int] = ()

    @property
    def images(self) -> list[Path]:
        """The files of the setting `images`."""
        folder = self.front.settings.images
        files = sorted(Path(folder).rglob("*")) if folder else []
        return [file for file in files if file.suffix.lower() in examples.SUFFIXES]

    @property
    def device(self) -> int | None:
        """The GPU to build on; None for the CPU."""
        return next(iter(self.gpus), None)

    def key(self, with_images: bool = True) -> str:
        """Changes if, and only if, the engines must be rebuilt. with_images: whether those of tasks verify them."""
        settings = asdict(self.front.settings)
        if self.gammas != self.front.settings.gamma_list():
            settings["gammas"] = self.gammas
        inputs = {
            "format": _BUILD_FORMAT,
            "settings": settings,
            "checkpoint": self.checkpoint.sha256,
            "images": [[file.name, file.stat().st_size] for file in self.images],
            "labels": self.described.classifier.labels if self.described.classifier else (),
            "provider": [self.provider.name, self.provider.version()],
            "precision": self.precision,
            "threads": self.threads,
            "hardware": with_cpu(self.device),
            "tasks": _examples(self.tasks_dir) if with_images and self.precision != "f32" else {},
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def plan(front: ImageFrontConfig, paths: BuildPaths, has_tasks: bool = False) -> ImagePlan:
    """Resolve checkpoint, provider, precision, threads and gammas. Raises ShapeshiftError.

    has_tasks: whether tasks are registered. Without any, the checkpoint's own classifier, which has no prompts, is all
    that is served: a gamma above 0 has an engine only if `use_gammas` names it.
    """
    settings = front.settings
    source = find_checkpoint(settings.checkpoint, paths)
    checkpoint, described = open_vision(source.folder, source.origin, paths.build / HASHES)
    described = repooled(described, settings.pooling)
    provider, gpus = provider_of(front.folder, settings.provider)
    resolved = hardware.resolve_precision(settings.precision, provider.name, next(iter(gpus), None))
    threads = front.serving.threads or cores()
    tasks_dir, gammas = tasks_folder(front, paths), built_gammas(front, described, has_tasks)
    planned = ImagePlan(front, checkpoint, described, provider, resolved, threads, gammas, tasks_dir, gpus)
    if settings.images and not planned.images:
        raise InvalidInputError("images", settings.images, f"a folder with images ({', '.join(examples.SUFFIXES)})")
    return planned


def built_gammas(front: ImageFrontConfig, described: Description, has_tasks: bool) -> tuple[int, ...]:
    """The gammas that have engines. has_tasks: as for `plan`."""
    has_prompts = has_tasks or described.classifier is None
    named = front.serving.gammas(())
    return tuple(gamma for gamma in front.settings.gamma_list() if gamma <= 0 or has_prompts or gamma in named)


def tasks_folder(front: ImageFrontConfig, paths: BuildPaths) -> Path:
    """The task registry of the front, which may be missing."""
    setting = front.serving.tasks_dir
    return paths.root / setting if setting else paths.build / "tasks" / front.name


def _examples(tasks_dir: Path) -> dict[str, list[str]]:
    """The hashes of each registered task that keeps images, and of its images."""
    files = [(entry, entry.folder / examples.FILE) for entry in registry.read(tasks_dir)]
    return {entry.name: [entry.sha256, file_sha256(file)] for entry, file in files if file.is_file()}


def compiled(planned: ImagePlan, folder: Path) -> dict[tuple[int, str], Path]:
    """The folders of engines in `folder` that `planned` would compile again, by gamma and precision.

    They were verified without tasks, or with others: those with the images of a task decide again.
    """
    try:
        result = image_manifest.load(folder)
        manifest.check_files(folder, result.files)
    except EngineError:
        return {}
    before = replace(planned, gammas=tuple(entry.gamma for entry in result.engines))
    if result.build_key not in (before.key(), before.key(with_images=False)):
        return {}
    return {(entry.gamma, entry.precision): folder / entry.folder for entry in result.engines}


def is_current(planned: ImagePlan, folder: Path) -> bool:
    """Whether `folder` holds what `planned` would build, or that at all gammas stated, undamaged."""
    try:
        built = image_manifest.load(folder)
        manifest.check_files(folder, built.files)
    except EngineError:
        return False
    at_all_gammas = replace(planned, gammas=planned.front.settings.gamma_list())
    return built.build_key in (planned.key(), at_all_gammas.key())
