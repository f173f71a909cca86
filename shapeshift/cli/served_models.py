"""The models that `shapeshift serve` loads: those asked for, and those that they call."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from shapeshift.cascade import candidates
from shapeshift.engines import failures
from shapeshift.errors import EngineError, NotFoundError, ShapeshiftError, UnsupportedError
from shapeshift.progress import warn
from shapeshift.sidecar import run_files
from shapeshift.triton import model_config
from shapeshift.triton.names import check_model_name


def models_to_load(options: argparse.Namespace, repositories: Sequence[Path]) -> list[str]:
    """The models of `options`, and those that they call, without those that the last `make engines` could not build.

    Raises EngineError if none is left, or if one could not be built with --strict.
    """
    requested = with_called(_requested(options, repositories), repositories)
    if options.repository:
        return requested
    failed = failures.read(options.build)
    # A model that was never built is not in the generated repository, so `requested` lacks it without --models.
    missing = [name for name in (requested if options.models else failed) if name in failed]
    models = [name for name in requested if name not in failed]
    if missing and (options.strict or not models):
        raise EngineError("; ".join(f"{name} could not be built: {failed[name]}" for name in missing))
    for name in missing:
        warn(f"shapeshift serve: skipping {name}, which could not be built: {failed[name]}")
    return models


def without_misfits(
    models: Sequence[str], refused: Mapping[str, str], repositories: Sequence[Path], strict: bool
) -> list[str]:
    """`models` without those that do not fit in the memory and those that call one, each named on standard error.

    refused: the reasons, by model. Raises UnsupportedError if none is left, or with `strict` if one does not fit.
    """
    reasons = dict(refused)
    for _ in models:
        for name in models:
            called = next((one for one in models_called_by(name, repositories) if one in reasons), None)
            if called is not None:
                reasons.setdefault(name, f"needs {called}")
    fitting = [name for name in models if name not in reasons]
    if reasons and (strict or not fitting):
        raise UnsupportedError("; ".join(f"{name} does not fit: {reason}" for name, reason in reasons.items()))
    for name, reason in reasons.items():
        warn(f"shapeshift serve: skipping {name}, which does not fit: {reason}")
    return fitting


def _requested(options: argparse.Namespace, repositories: Sequence[Path]) -> list[str]:
    """The models of --models, or all models of the repositories that are not workers."""
    if options.models:
        return [check_model_name(name.strip()) for name in options.models.split(",")]
    for folder in repositories:
        if not folder.is_dir():
            raise NotFoundError(
                f"no model repository at {folder}; run `shapeshift engines`, or name one with --repository"
            )
    available = sorted(run_files.repository_models(repositories)[0])
    if not available:
        raise NotFoundError(f"no models in {', '.join(map(str, repositories))}; run `shapeshift engines`")
    return available


def with_called(models: Sequence[str], repositories: Sequence[Path]) -> list[str]:
    """`models`, and after them those that they call, each named on standard error."""
    names = list(models)
    for name in names:
        for called in models_called_by(name, repositories):
            if called not in names:
                warn(f"shapeshift serve: {name} needs {called}: loading it too")
                names.append(called)
    return names


def models_called_by(name: str, repositories: Sequence[Path]) -> Sequence[str]:
    """The models that the model `name` sends requests to. A cascade runs its first level itself."""
    folder = next((place / name for place in repositories if (place / name / "config.pbtxt").is_file()), None)
    if folder is None:
        return []
    try:
        config = model_config.read(folder / "config.pbtxt")
        parameters = model_config.parameters(config)
        if config.backend == "cascade":
            return candidates.serving(folder / parameters["candidates_dir"], parameters["task"]).candidate.levels[1:]
        return [parameters["forward_to"]] if "forward_to" in parameters else []
    except (ShapeshiftError, KeyError):
        # The server says what is wrong with this model.
        return []
