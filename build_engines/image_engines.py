"""The engines of an image model: exported, compiled, held against the eager model in f32, and profiled."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from build_engines.images import ImagePlan, Progress
from shapeshift.engines import manifest, verify
from shapeshift.engines.profile import interleaved
from shapeshift.engines.protocol import Engine
from shapeshift.engines.verify import Deviation, OffReferenceError
from shapeshift.token_adapt import folding
from shapeshift.token_adapt.gamma_module import GammaModule
from shapeshift.token_adapt.image_manifest import BATCHES, BatchLatency, GammaEntry
from shapeshift.token_adapt.schedule import activation_mb, tokens_after
from shapeshift.token_adapt.timm_weights import read_model

_PROFILE_BUDGET_S = 20.0
_VERIFIED_BATCHES = (1, 5)


@dataclass(frozen=True)
class Candidate:
    """An engine that computes what its module does, as far as `deviation` says."""

    module: GammaModule
    engine: Engine
    deviation: Deviation
    precision: str


def folder_of(gamma: int) -> str:
    """The sub-folder of a gamma's engine."""
    return f"gamma_{gamma}"


class ImageEngines:
    """Builds the engines of one plan in the folder `work`."""

    def __init__(self, planned: ImagePlan, work: Path, progress: Progress) -> None:
        progress("read the reference model")
        self._plan = planned
        self._work = work
        self._progress = progress
        self._model, _, _ = read_model(planned.checkpoint.folder)
        self.architecture = self._model.made

    def build(self) -> list[GammaEntry]:
        """All gammas; OffReferenceError names the first that is off the reference in every precision."""
        made = self.architecture
        state = {name: value.numpy() for name, value in self._model.state_dict().items()}
        folding.of_state(state, made.depth, made.heads, made.epsilon).save(self._work)
        return self._profiled([self.candidate(gamma) for gamma in self._plan.front.settings.gamma_list()])

    def candidate(self, gamma: int) -> Candidate:
        """The engine of one gamma, verified: in the plan's precision, or in f32 where that one is off the reference."""
        module = GammaModule(self._model, gamma).eval()
        try:
            return self._candidate(module, self._plan.precision)
        except OffReferenceError:
            if self._plan.precision == "f32":
                raise
            return self._candidate(module, "f32")

    def _candidate(self, module: GammaModule, precision: str) -> Candidate:
        self._progress(f"export, compile and verify gamma {module.gamma} in {precision}")
        plan = self._plan
        folder = self._work / folder_of(module.gamma)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with warnings.catch_warnings():
            # Tracing warns of every shape it fixes; that the graph serves other batches is verified below.
            warnings.simplefilter("ignore")
            plan.provider.export(module, module.example(2), folder, precision)
        plan.provider.compile(folder, precision, None, None)
        engine = plan.provider.open(folder, precision, plan.threads).engine(None, None)
        deviations = [_deviation(module, engine, images) for images in _VERIFIED_BATCHES]
        deviation = verify.worst(deviations)
        deviation.require_within(precision, f"gamma {module.gamma} ({plan.provider.name}, {precision})")
        return Candidate(module, engine, deviation, precision)

    def _profiled(self, candidates: list[Candidate]) -> list[GammaEntry]:
        self._progress("profile")
        calls: list[tuple[int, Callable[[], object]]] = [
            (images, partial(one.engine.run, one.module.example(images))) for one in candidates for images in BATCHES
        ]
        points = iter(interleaved(calls, _PROFILE_BUDGET_S))
        return [_entry(one, tuple(next(points) for _ in BATCHES)) for one in candidates]


def _deviation(module: GammaModule, engine: Engine, images: int) -> Deviation:
    inputs = module.example(images, seed=images, tasks=3)
    return verify.compare(engine.run(inputs)["FEATURES"], module.features(inputs))


def _entry(one: Candidate, points: tuple[manifest.Latency, ...]) -> GammaEntry:
    made, layers = one.module.model.made, one.module.layers
    return GammaEntry(
        gamma=one.module.gamma,
        folder=folder_of(one.module.gamma),
        precision=one.precision,
        tokens=tokens_after(layers, made.prefix),
        memory_mb=round(activation_mb(layers, made.width, made.heads, made.mlp_width, made.prefix), 3),
        max_error=one.deviation.max_error,
        min_cosine=one.deviation.min_cosine,
        latency=tuple(BatchLatency(point.tokens, point.median_ms, point.p99_ms, point.best_ms) for point in points),
    )
