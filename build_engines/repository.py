"""Reading the front models, and generating the repository that the server loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from build_engines import cascade, decode, images, workers
from build_engines.plan import Plan
from build_engines.published import CONFIG, write_front
from build_engines.settings import FrontModel, Places
from shapeshift import settings
from shapeshift.engines import manifest
from shapeshift.engines.manifest import Manifest
from shapeshift.engines.settings import GeneratedSettings, TextEngineSettings
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.polymorph.placement import Placement
from shapeshift.polymorph.settings import FleetSettings, PolymorphSettings
from shapeshift.triton import modelconfig

BACKEND = "polymorph"

Front: TypeAlias = FrontModel | decode.DecodeFront | images.ImageFront | images.EmulatedFront | cascade.CascadeFront


def front_models(places: Places, only: set[str]) -> list[Front]:
    """The models of the repository, or those named in `only`. Raises the error of the first that cannot be read."""
    return [read(folder) for folder in front_folders(places, only)]


def front_folders(places: Places, only: set[str]) -> list[Path]:
    """The folders of the models of the repository, or of those named in `only`. Raises NotFoundError for a name that
    has none, InvalidInputError for one that workers of another model have.
    """
    folders = sorted(path.parent for path in places.repository.glob(f"*/{CONFIG}"))
    missing = only - {folder.name for folder in folders}
    if missing:
        known = ", ".join(folder.name for folder in folders)
        raise NotFoundError(f"no model {', '.join(sorted(missing))} in {places.repository}; there are: {known}")
    workers.check_names([folder.name for folder in folders])
    return [folder for folder in folders if not only or folder.name in only]


def asks_others(front: Front) -> bool:
    """Whether it answers by calling models of the repository."""
    return isinstance(front, cascade.CascadeFront) or (
        isinstance(front, decode.DecodeFront) and bool(decode.forwards_to(front))
    )


def needs(front: Front, places: Places) -> tuple[str, ...]:
    """The models that `front` calls, which must have been published before it."""
    if isinstance(front, cascade.CascadeFront):
        return cascade.levels(front, places)
    return decode.forwards_to(front) if isinstance(front, decode.DecodeFront) else ()


def read(folder: Path) -> Front:
    """The model in `folder`; errors name the field."""
    config = modelconfig.read(folder / CONFIG)
    if config.name and config.name != folder.name:
        raise InvalidInputError("name", config.name, f"the folder's name, {folder.name}")
    values = modelconfig.parameters(config)
    if config.backend not in _READERS:
        raise InvalidInputError("backend", config.backend, f"one of {', '.join(sorted(_READERS))}")
    return _READERS[config.backend](folder, config, values)


def _read_texts(folder: Path, config: Any, values: Mapping[str, str]) -> FrontModel:
    settings.refuse_unknown(values, settings.names(TextEngineSettings, PolymorphSettings))
    serving = settings.read(PolymorphSettings, values)
    return FrontModel(folder.name, folder, config, settings.read(TextEngineSettings, values), serving)


_READERS: dict[str, Callable[[Path, Any, Mapping[str, str]], Front]] = {
    BACKEND: _read_texts,
    decode.BACKEND: decode.read,
    decode.WITH_ADAPTERS: decode.read,
    images.BACKEND: images.read,
    cascade.BACKEND: cascade.read,
}


def generate(planned: Plan, engines: Path, made: Manifest, places: Places) -> Placement:
    """Write the folders of the model and of its workers in the generated repository, with all settled.

    Returns where the model's engines will live.
    """
    front = planned.front
    target = places.generated / front.name
    placed = workers.place(front.serving, made)
    stated = {
        "provider": made.provider,
        "precision": made.precision,
        "engines": places.stated(engines, target),
        "manifest_sha256": manifest.sha256(engines),
        "checkpoint_sha256": made.checkpoint_sha256,
        "profile": json.dumps(profile(made)),
        **workers.stated(placed, front, made),
    }
    assert set(stated) <= settings.names(TextEngineSettings, PolymorphSettings, GeneratedSettings, FleetSettings)
    about = f"engines: {made.provider}, {made.precision}; {made.tolerance}"
    config = write_front(front.folder, front.config, target, stated, about)
    workers.generate(config, made, places.generated)
    return placed


def profile(made: Manifest) -> dict[str, object]:
    """The measured latencies as the generated config carries them, milliseconds of one thread.

    Each point of `latency` is [tokens, median, 99th percentile, least].
    """
    return {
        "hardware": made.hardware,
        "provider": f"{made.provider} {made.provider_version}",
        "precision": made.precision,
        "engines": [
            {
                "tokens": entry.tokens,
                "rows": entry.rows,
                "latency": [[point.tokens, point.median_ms, point.p99_ms, point.best_ms] for point in entry.latency],
            }
            for entry in made.engines
        ],
    }
