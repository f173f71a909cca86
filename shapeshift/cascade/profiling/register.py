"""From a labelled sample and the names of built models to a candidate table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shapeshift.cascade.candidates import CandidateTable, LevelModel
from shapeshift.cascade.profiling.model_profile import ModelProfile, Task, Texts, profile_model, random_half
from shapeshift.cascade.profiling.observation import ModelRunner, Observation
from shapeshift.cascade.profiling.samples import Sample
from shapeshift.cascade.profiling.search import MAX_LEVELS, CandidateSearch
from shapeshift.engines.hardware import cpu_model
from shapeshift.errors import InvalidInputError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ProfilingSettings:
    """Settings of a run; defaults as in the paper.

    k, algorithms: of Eq. 4; max_levels: of a cascade; tolerance: of a regression, within which a number is right and
    two models agree; seed: of the random half of the texts that chooses.
    """

    k: float = 10.0
    algorithms: Sequence[str] = ("sigmoid",)
    max_levels: int = MAX_LEVELS
    tolerance: float = 0.0
    seed: int = 0


def profile(
    task: str, sample: Sample, engines: Path, names: Sequence[str], params: ProfilingSettings, progress: Progress
) -> CandidateTable:
    """Run every model over the sample and search for candidates. Raises the errors of `shapeshift.errors`.

    engines: folder of all models' engines; progress(text) is called with what runs and its percentage.
    """
    started = time.monotonic()
    models = {name: ModelRunner(engines, name) for name in names}
    labels = _common_labels(models)
    is_regression = len(labels) == 1
    _check(is_regression, params, len(sample.texts))
    truth = sample.values() if is_regression else sample.classes(labels)
    labelled = Task(sample.texts, truth, random_half(len(sample.texts), params.seed), params.tolerance)
    profiles: list[ModelProfile] = []
    for name, model in models.items():
        observed = model.observe(sample.texts, partial(_report, progress, name))
        profiles.append(profile_model(name, observed, labelled))

    def run(name: str, texts: Texts, what: str) -> Observation:
        return models[name].observe(texts, partial(_report, progress, what))

    search = CandidateSearch(labelled, profiles, run, params.k, params.algorithms)
    candidates = search.candidates(params.max_levels)
    origin: dict[str, Any] = {
        "hardware": cpu_model(),
        "texts": len(sample.texts),
        "scoring_texts": int(labelled.scoring.sum()),
        "providers": sorted({f"{one.manifest.provider} {one.manifest.provider_version}" for one in models.values()}),
        "precision": sorted({one.manifest.precision for one in models.values()}),
        "seed": params.seed,
        "reliability": {one.name: [asdict(bin_) for bin_ in one.reliability if bin_.count] for one in profiles},
        "seconds": round(time.monotonic() - started, 1),
    }
    kind = "regression" if is_regression else "classification"
    scored = {one.name: one.accuracy for one in candidates}
    levels = tuple(_level_model(one, models[one.name], scored[one.name]) for one in profiles)
    return CandidateTable(task, kind, labels, sample.pairs, params.tolerance, origin, levels, tuple(candidates))


def _report(progress: Progress, what: str, percent: int) -> None:
    progress(f"{what}: {percent}%")


def _common_labels(models: dict[str, ModelRunner]) -> tuple[str, ...]:
    labels = {name: model.manifest.labels for name, model in models.items()}
    first, *others = labels
    for name in others:
        if labels[name] != labels[first]:
            raise InvalidInputError(
                "models", f"{name}: {len(labels[name])} labels", f"the labels of {first}, in its order"
            )
    return labels[first]


def _check(is_regression: bool, params: ProfilingSettings, texts: int) -> None:
    if texts < 2:
        raise InvalidInputError(
            "sample", f"{texts} text", "at least 2: one part chooses, the other measures what it chose"
        )
    if is_regression and params.tolerance <= 0:
        raise InvalidInputError("tolerance", params.tolerance, "above 0, as the models have one label: a regression")
    if not is_regression and params.tolerance:
        raise InvalidInputError("tolerance", params.tolerance, "0, as the models have several labels: a classification")


def _level_model(one: ModelProfile, model: ModelRunner, accuracy: float) -> LevelModel:
    manifest = model.manifest
    outputs = (*model.outputs, "OFFSETS", "ENGINE_MS")
    return LevelModel(
        one.name,
        manifest.checkpoint_sha256,
        round(accuracy, 6),
        round(one.mean_ms, 4),
        one.temperature,
        one.ece,
        outputs,
    )
