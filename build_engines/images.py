"""Front models that classify images: an engine for each gamma, exported, compiled, verified and profiled."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from build_engines.published import write_front
from build_engines.settings import Places
from shapeshift import settings
from shapeshift.engines import manifest, precision, registry
from shapeshift.engines.checkpoint import Checkpoint, find, open_checkpoint
from shapeshift.engines.hardware import cores, cpu_model
from shapeshift.engines.protocol import Provider
from shapeshift.engines.verify import MIN_COSINE
from shapeshift.errors import EngineError
from shapeshift.token_adapt import emulated, image_manifest
from shapeshift.token_adapt.architecture import Architecture
from shapeshift.token_adapt.engine_settings import ImageEngineSettings
from shapeshift.token_adapt.image_manifest import GammaEntry, ImageManifest
from shapeshift.token_adapt.loading import EMULATED, EmulatedSettings
from shapeshift.token_adapt.settings import TokenAdaptSettings

BACKEND = "token_adapt"

# Raised whenever a change of ours makes engines that were built before it wrong or worse.
_BUILD_FORMAT = 2

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ImageFront:
    """A folder of the model repository whose model classifies images."""

    name: str
    folder: Path
    config: Any
    settings: ImageEngineSettings
    serving: TokenAdaptSettings


@dataclass(frozen=True)
class EmulatedFront:
    """A folder whose model imitates one that its `profile_file` describes."""

    name: str
    folder: Path
    config: Any
    settings: EmulatedSettings


@dataclass(frozen=True)
class ImagePlan:
    """A front model with everything `auto` resolved."""

    front: ImageFront
    checkpoint: Checkpoint
    provider: Provider
    precision: str
    threads: int

    def key(self) -> str:
        """Changes when, and only when, the engines must be built again."""
        inputs = {
            "format": _BUILD_FORMAT,
            "settings": asdict(self.front.settings),
            "checkpoint": self.checkpoint.sha256,
            "provider": [self.provider.name, self.provider.version()],
            "precision": self.precision,
            "threads": self.threads,
            "hardware": cpu_model(),
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def read(folder: Path, config: Any, values: Mapping[str, str]) -> ImageFront | EmulatedFront:
    """The front model in `folder`; errors name the field."""
    serving = settings.read(TokenAdaptSettings, values)
    if values.get("provider") == EMULATED:
        settings.refuse_unknown(values, settings.names(EmulatedSettings, TokenAdaptSettings))
        return EmulatedFront(folder.name, folder, config, settings.read(EmulatedSettings, values))
    settings.refuse_unknown(values, settings.names(ImageEngineSettings, TokenAdaptSettings))
    return ImageFront(folder.name, folder, config, settings.read(ImageEngineSettings, values), serving)


def publish_emulated(front: EmulatedFront, places: Places) -> str:
    """Check the description and write the model's folder in the generated repository; a line that says what it is."""
    file, target = front.folder / front.settings.profile_file, places.generated / front.name
    model = emulated.read(file, front.settings.time_scale)
    about = f"emulated: gammas {', '.join(map(str, model.gammas))}, tasks {', '.join(model.tasks)}"
    write_front(front.folder, front.config, target, {"profile_file": places.stated(file, target)}, about)
    return about


def publish(front: ImageFront, places: Places, progress: Progress) -> tuple[ImageManifest, bool]:
    """Bring the engines up to date and write the model's folder in the generated repository.

    Returns the manifest, and whether anything was built.
    """
    planned = plan(front, places)
    target = places.engines / front.name
    fresh = not is_current(planned, target)
    made = build(planned, target, progress) if fresh else image_manifest.load(target)
    generate(planned, target, made, places)
    return made, fresh


def plan(front: ImageFront, places: Places) -> ImagePlan:
    """Resolve checkpoint, provider, precision and threads. Raises the errors of `shapeshift.errors`."""
    own = front.settings
    checkpoint = open_checkpoint(find(own.checkpoint, places.checkpoints), needed=("config.json",))
    provider = registry.provider(registry.resolve(own.provider))
    stated = "f32" if own.precision == "auto" and provider.name == "onnxruntime" else own.precision
    resolved = precision.resolve(stated, provider.name == "tensorrt")
    return ImagePlan(front, checkpoint, provider, resolved, front.serving.threads or cores())


def is_current(planned: ImagePlan, folder: Path) -> bool:
    """Whether `folder` already holds just what `planned` would build, whole."""
    try:
        found = image_manifest.load(folder)
        manifest.check_files(folder, found.files)
    except EngineError:
        return False
    return found.build_key == planned.key()


def build(planned: ImagePlan, target: Path, progress: Progress) -> ImageManifest:
    """Build the engines of `planned` and put them at `target`; on any error `target` stays as it was."""
    # torch takes seconds to import, which a build with nothing to do must not wait for.
    from build_engines.image_engines import ImageEngines

    work = target.with_name(f".{target.name}.building")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        built = ImageEngines(planned, work, progress)
        made = _manifest(planned, built.architecture, work, built.build())
        made.save(work)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def _manifest(planned: ImagePlan, architecture: Architecture, work: Path, entries: list[GammaEntry]) -> ImageManifest:
    return ImageManifest(
        model=planned.front.name,
        checkpoint_sha256=planned.checkpoint.sha256,
        build_key=planned.key(),
        provider=planned.provider.name,
        provider_version=planned.provider.version(),
        precision=planned.precision,
        threads=planned.threads,
        image_size=architecture.image_size,
        width=architecture.width,
        depth=architecture.depth,
        heads=architecture.heads,
        epsilon=architecture.epsilon,
        features=architecture.features,
        reference="the eager model, f32",
        tolerance=_tolerance(planned.precision, entries),
        hardware=cpu_model(),
        files=manifest.list_files(work),
        engines=tuple(entries),
    )


def _tolerance(stated: str, entries: list[GammaEntry]) -> str:
    said = f"cosine with the reference at least {MIN_COSINE[stated]} for every image"
    others = ", ".join(str(entry.gamma) for entry in entries if entry.precision != stated)
    return f"{said}; f32 and at least {MIN_COSINE['f32']} where {stated} was off: gamma {others}" if others else said


def generate(planned: ImagePlan, engines: Path, made: ImageManifest, places: Places) -> None:
    """Write the model's folder in the generated repository, with all settled."""
    front = planned.front
    target = places.generated / front.name
    stated = {
        "checkpoint": places.stated(planned.checkpoint.folder, target),
        "provider": made.provider,
        "precision": made.precision,
        "threads": str(made.threads),
        "engines": places.stated(engines, target),
        "manifest_sha256": manifest.sha256(engines),
        "checkpoint_sha256": made.checkpoint_sha256,
        "profile": json.dumps(image_manifest.profile(made)),
    }
    if front.serving.tasks_dir:
        stated["tasks_dir"] = places.stated(places.root / front.serving.tasks_dir, target)
    about = f"engines: {made.provider}, {made.precision}, {made.threads} threads; {made.tolerance}"
    write_front(front.folder, front.config, target, stated, about)
