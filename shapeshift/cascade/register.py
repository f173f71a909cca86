"""From a labelled sample and the names of built models to a candidate table and the candidate that meets targets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shapeshift.cascade import profiling
from shapeshift.cascade.choice import Choice, choose
from shapeshift.cascade.observe import Observed, ProfiledModel
from shapeshift.cascade.profiled import Profiled, Task, Texts, halves, profiled
from shapeshift.cascade.profiling import Search
from shapeshift.cascade.sample import Sample
from shapeshift.cascade.table import LevelModel, Table
from shapeshift.engines.hardware import cpu_model
from shapeshift.errors import InvalidInputError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Profiling:
    """Settings of a run; defaults as in the paper.

    min_accuracy, max_latency_ms: the targets, 0: none; k, algorithms: of Eq. 4; most_levels: of a cascade; tolerance:
    for regressions, within which a number is right, and two models agree; seed: of the half that calibration sees.
    """

    min_accuracy: float = 0.0
    max_latency_ms: float = 0.0
    k: float = 10.0
    algorithms: Sequence[str] = ("sigmoid",)
    most_levels: int = profiling.MOST_LEVELS
    tolerance: float = 0.0
    seed: int = 0


def profile(
    task: str, sample: Sample, engines: Path, names: Sequence[str], wanted: Profiling, progress: Progress
) -> Choice:
    """Run every model over the sample, look for candidates, choose. Raises the errors of `shapeshift.errors`.

    progress(step) is told what runs, and after a colon how much of it has run.
    """
    started = time.monotonic()
    models = {name: ProfiledModel(engines, name) for name in names}
    labels = _common_labels(models)
    is_regression = len(labels) == 1
    _check(is_regression, wanted)
    truth = sample.values() if is_regression else sample.numbers(labels)
    asked = Task(sample.texts, truth, wanted.tolerance)
    fit = halves(len(sample.texts), wanted.seed)
    found: list[Profiled] = []
    for name, model in models.items():
        found.append(profiled(name, model.observe(sample.texts, partial(_tell, progress, name)), asked, fit))

    def run(name: str, texts: Texts, what: str) -> Observed:
        return models[name].observe(texts, partial(_tell, progress, what))

    search = Search(asked, found, fit, run, wanted.k, wanted.algorithms)
    candidates = search.candidates(wanted.most_levels)
    made: dict[str, Any] = {
        "hardware": cpu_model(),
        "texts": len(sample.texts),
        "providers": sorted({f"{one.made.provider} {one.made.provider_version}" for one in models.values()}),
        "precision": sorted({one.made.precision for one in models.values()}),
        "seed": wanted.seed,
        "reliability": {one.name: [asdict(own) for own in one.reliability if own.count] for one in found},
        "seconds": round(time.monotonic() - started, 1),
    }
    kind = "regression" if is_regression else "classification"
    levels = tuple(_level(one, models[one.name]) for one in found)
    table = Table(task, kind, labels, sample.pairs, wanted.tolerance, made, levels, tuple(candidates))
    return choose(table, wanted.min_accuracy, wanted.max_latency_ms)


def _tell(progress: Progress, what: str, percent: int) -> None:
    progress(f"{what}: {percent}%")


def _common_labels(models: dict[str, ProfiledModel]) -> tuple[str, ...]:
    labels = {name: model.made.labels for name, model in models.items()}
    first, *others = labels
    for name in others:
        if labels[name] != labels[first]:
            raise InvalidInputError(
                "models", f"{name}: {len(labels[name])} labels", f"the labels of {first}, in its order"
            )
    return labels[first]


def _check(is_regression: bool, wanted: Profiling) -> None:
    if is_regression and wanted.tolerance <= 0:
        raise InvalidInputError("tolerance", wanted.tolerance, "above 0 for models with one number: a regression")
    if not is_regression and wanted.tolerance:
        raise InvalidInputError("tolerance", wanted.tolerance, "0 for models that tell classes apart")


def _level(one: Profiled, model: ProfiledModel) -> LevelModel:
    made = model.made
    outputs = (*model.outputs, "OFFSETS", "ENGINE_MS")
    return LevelModel(
        one.name,
        made.checkpoint_sha256,
        round(one.accuracy, 6),
        round(one.mean_ms, 4),
        one.temperature,
        one.ece,
        outputs,
    )
