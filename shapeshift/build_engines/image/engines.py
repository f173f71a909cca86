"""Builds the engines of an image model: export, compile, verify against the eager f32 model, profile."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from shapeshift.build_engines.image import labels
from shapeshift.build_engines.image.labels import MIN_AGREEMENT, Agreement, read_tasks
from shapeshift.build_engines.image.plan import ImagePlan
from shapeshift.engines import manifest, verify
from shapeshift.engines.gpu import with_cpu
from shapeshift.engines.interfaces import Array, Engine, Runtime
from shapeshift.engines.profile import idle_ms, quantiles, sample
from shapeshift.engines.verify import MIN_COSINE, Deviation, VerificationError
from shapeshift.errors import InvalidInputError
from shapeshift.progress import ProgressCallback
from shapeshift.token_adapt.checkpoints.weights import read_described, read_similarity
from shapeshift.token_adapt.image_decoding import decode
from shapeshift.token_adapt.model.gamma_module import GammaModule
from shapeshift.token_adapt.model.manifest import BATCHES, BatchLatency, GammaEntry, ImageManifest
from shapeshift.token_adapt.model.schedule import activation_mb, output_tokens
from shapeshift.token_adapt.model.vision_transformer import prompt_folding
from shapeshift.token_adapt.tasks.folder import Backbone, Head, save_classifier

_PROFILE_BUDGET_S = 2.0
"""For each gamma."""
# A batch that takes longer is not profiled: nobody waits for it, and the costs continue with the last slope.
_LONGEST_BATCH_S = 2.0
_VERIFIED_BATCHES = (1, 5)
# Images on which vectors are compared: generated, or at most so many files.
_NUM_GENERATED, _MOST_IMAGES, _MAX_PIXELS = 16, 256, 100_000_000
_GENERATED = "generated images"


@dataclass(frozen=True)
class VerifiedEngine:
    """An engine, the module it was exported from, and the deviation between them.

    agreement: of their labels, where these decide in place of the deviation.
    """

    module: GammaModule
    engine: Engine
    deviation: Deviation
    precision: str
    agreement: Agreement | None


def folder_of(gamma: int) -> str:
    """The name of the subfolder of a gamma's engine."""
    return f"gamma_{gamma}"


class ImageEngineBuilder:
    """Builds the engines of one plan in the folder `work`.

    compiled: folders of engines by gamma and precision, which are copied and verified instead of compiled.
    """

    def __init__(
        self,
        planned: ImagePlan,
        work: Path,
        progress: ProgressCallback,
        compiled: Mapping[tuple[int, str], Path] = MappingProxyType({}),
    ) -> None:
        progress("read the reference model")
        self._plan = planned
        self._work = work
        self._progress = progress
        self._compiled = compiled
        self._model, weight, bias = read_described(planned.checkpoint.folder, planned.described)
        self._head = None if weight is None or bias is None else Head(weight.numpy(), bias.numpy())
        architecture = planned.described.architecture
        self._runtimes: list[Runtime] = []
        self._backbone = Backbone(
            planned.checkpoint.sha256, architecture.depth, architecture.width, architecture.features, planned.gammas
        )

    def build(self) -> ImageManifest:
        """What describes the engines. Raises VerificationError naming the first gamma that fails in every precision."""
        architecture = self._plan.described.architecture
        if self._head is not None:
            save_classifier(self._work, self._head)
        state = {name: value.numpy() for name, value in self._model.state_dict().items()}
        prompt_folding(state, architecture.depth, architecture.heads, architecture.epsilon).save(self._work)
        engines = [self.build_gamma(gamma) for gamma in self._plan.gammas]
        return self._manifest(self._profiled(engines, self._cosines(engines)))

    def _manifest(self, entries: list[GammaEntry]) -> ImageManifest:
        planned = self._plan
        architecture = planned.described.architecture
        classifier = planned.described.classifier
        return ImageManifest(
            model=planned.front.name,
            family=planned.described.family,
            checkpoint_sha256=planned.checkpoint.sha256,
            build_key=planned.key(),
            provider=planned.provider.name,
            provider_version=planned.provider.version(),
            precision=planned.precision,
            threads=planned.threads,
            preprocessing=planned.described.preprocessing,
            width=architecture.width,
            depth=architecture.depth,
            heads=architecture.heads,
            epsilon=architecture.epsilon,
            features=architecture.features,
            labels=classifier.labels if classifier else (),
            reference="the eager model, f32",
            tolerance=_tolerance(planned.precision, entries),
            hardware=with_cpu(planned.device),
            files=manifest.list_files(self._work),
            engines=tuple(entries),
            checkpoint_origin=planned.checkpoint.origin,
            device_mb=self._device_mb,
            similarity=read_similarity(planned.checkpoint.folder),
            vectors=planned.front.settings.images or _GENERATED,
        )

    @property
    def _device_mb(self) -> float:
        """MiB of the GPU's memory that the engines take; 0 on a CPU."""
        return 0.0 if self._plan.device is None else round(max(one.used_mb() for one in self._runtimes), 1)

    def build_gamma(self, gamma: int) -> VerifiedEngine:
        """The verified engine of one gamma: in the plan's precision, or in f32 if that fails the verification."""
        module = GammaModule(self._model, gamma).eval()
        try:
            return self._verified(module, self._plan.precision)
        except VerificationError:
            if self._plan.precision == "f32":
                raise
            return self._verified(module, "f32")

    def _verified(self, module: GammaModule, precision: str) -> VerifiedEngine:
        plan = self._plan
        folder = self._work / folder_of(module.gamma)
        what = f"gamma {module.gamma} in {precision}, {plan.gammas.index(module.gamma)} of {len(plan.gammas)} done"
        shutil.rmtree(folder, ignore_errors=True)
        if (compiled := self._compiled.get((module.gamma, precision))) is not None:
            self._progress(f"verify: {what}")
            shutil.copytree(compiled, folder)
        else:
            self._progress(f"export, compile and verify: {what}")
            folder.mkdir()
            self._compile(module, folder, precision)
        beside = next(iter(self._runtimes), None)
        self._runtimes.append(plan.provider.open(folder, precision, plan.threads, plan.device, beside=beside))
        engine = self._runtimes[-1].engine(None, None)
        deviations = [_deviation(module, engine, images) for images in _VERIFIED_BATCHES]
        deviation = verify.worst(deviations)
        name = f"gamma {module.gamma} ({plan.provider.name}, {precision})"
        agreement = None if precision == "f32" else self._agreement(module, engine)
        if agreement is None:
            deviation.require_within(precision, name)
        else:
            agreement.require(name)
        return VerifiedEngine(module, engine, deviation, precision, agreement)

    def _compile(self, module: GammaModule, folder: Path, precision: str) -> None:
        provider = self._plan.provider
        with warnings.catch_warnings():
            # Tracing warns about every shape that it fixes; the verification below runs other batch sizes.
            warnings.simplefilter("ignore")
            provider.export(module, module.example(2), folder, precision)
        provider.compile(folder, precision, None, None)

    def _agreement(self, module: GammaModule, engine: Engine) -> Agreement | None:
        """Of the labels, for a module that merges tokens; None for others, and where no task keeps images."""
        tasks = read_tasks(self._plan.tasks_dir, self._backbone, module.gamma) if module.gamma < 0 else []
        if not tasks:
            return None

        def computed(pixels: Array) -> Array:
            return engine.run({"PIXELS": pixels})["FEATURES"].copy()

        return labels.compare(tasks, computed, lambda pixels: module.features({"PIXELS": pixels}))

    def _cosines(self, engines: list[VerifiedEngine]) -> dict[int, float]:
        """By gamma, how far its vectors are from those of gamma 0; none above 0, where vectors depend on the task."""
        self._progress("compare the vectors of the gammas")
        pixels = sample_images(self._plan)
        vectors = {
            one.module.gamma: np.concatenate([one.engine.run({"PIXELS": part})["FEATURES"].copy() for part in pixels])
            for one in engines
            if one.module.gamma <= 0
        }
        return {gamma: round(_mean_cosine(features, vectors[0]), 6) for gamma, features in vectors.items()}

    def _profiled(self, candidates: list[VerifiedEngine], cosines: Mapping[int, float]) -> list[GammaEntry]:
        self._progress("profile")
        batches = _batches(candidates)
        calls = {
            one.module.gamma: {images: partial(one.engine.run, one.module.example(images)) for images in batches}
            for one in candidates
        }
        profile = latencies(calls, _PROFILE_BUDGET_S * len(candidates), on_cpu=self._plan.device is None)
        return [_entry(one, profile[one.module.gamma], cosines.get(one.module.gamma, 0.0)) for one in candidates]


def latencies(
    calls: Mapping[int, Mapping[int, Callable[[], object]]], budget_s: float, on_cpu: bool
) -> dict[int, tuple[BatchLatency, ...]]:
    """By gamma, the latency of each call, which computes a batch of the number of images that it stands under.

    All gammas have the same batches. `best_ms` is what counts: on a CPU `profile.idle_ms`, on a GPU the smallest
    sample. A batch is never slower with fewer tokens: what says otherwise is an error of the measurement. That holds
    among the gammas that merge, and among the others. Merging itself takes time: gamma 0 may be faster for few images.
    """
    gammas, batches = sorted(calls), list(next(iter(calls.values())))
    clock_ms, processor_ms = (
        times.reshape(len(gammas), len(batches), -1)
        for times in sample([calls[gamma][images] for gamma in gammas for images in batches], budget_s)
    )
    merging = sum(gamma < 0 for gamma in gammas)
    points = []
    for index, images in enumerate(batches):
        clock, processor = clock_ms[:, index], processor_ms[:, index]
        best = idle_ms(clock, processor) if on_cpu else clock.min(axis=1)
        for group in (best[:merging], best[merging:]):
            group[:] = np.minimum.accumulate(group[::-1])[::-1]
        points.append(
            [
                BatchLatency(images, *quantiles(times), round(float(ms), 4))
                for times, ms in zip(clock, best, strict=True)
            ]
        )
    return dict(zip(gammas, zip(*points, strict=True), strict=True))


def _batches(candidates: list[VerifiedEngine]) -> list[int]:
    """Those of BATCHES that the engine of most tokens runs in time; the smaller two in any case."""
    slowest = max(candidates, key=lambda one: output_tokens(one.module.layers, one.module.model.architecture.prefix))
    few = BATCHES[1]
    slowest.engine.run(slowest.module.example(few))
    start = time.perf_counter()
    slowest.engine.run(slowest.module.example(few))
    image_s = (time.perf_counter() - start) / few
    return [images for images in BATCHES if images <= few or images * image_s <= _LONGEST_BATCH_S]


def _deviation(module: GammaModule, engine: Engine, images: int) -> Deviation:
    inputs = module.example(images, seed=images, tasks=3)
    return verify.compare(engine.run(inputs)["FEATURES"], module.features(inputs))


def sample_images(planned: ImagePlan) -> list[Array]:
    """The images on which vectors are compared, uint8 [n, size, size, 3] in parts: of the setting `images`, evenly
    chosen, or generated ones. Raises InvalidInputError for a file that is no image.
    """
    preprocessing, files = planned.described.preprocessing, planned.images
    if not files:
        return [_generated(preprocessing.size, _NUM_GENERATED)]
    chosen = [files[int(place)] for place in np.linspace(0, len(files) - 1, min(len(files), _MOST_IMAGES))]
    pixels = []
    for file in chosen:
        try:
            pixels.append(decode(file.read_bytes(), preprocessing, _MAX_PIXELS))
        except InvalidInputError as error:
            raise InvalidInputError("images", str(file), str(error)) from None
    return np.array_split(np.stack(pixels), -(-len(pixels) // _NUM_GENERATED))


def _generated(size: int, count: int) -> Array:
    """Images whose amplitudes fall with the frequency, as those of photographs do."""
    noise = np.random.default_rng(0)
    down, right = np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]
    falling = 1 / np.maximum(np.hypot(down, right), 1 / size)
    spectrum = np.fft.rfft2(noise.standard_normal((count, 4, size, size))) * falling
    light, *colours = (plane / plane.std() for plane in np.fft.irfft2(spectrum, (size, size)).swapaxes(0, 1))
    planes = np.stack([light + 0.4 * colour for colour in colours], axis=-1)
    return np.asarray(np.clip(128 + 50 * planes, 0, 255), np.uint8)


def _mean_cosine(ours: Array, theirs: Array) -> float:
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(1) / np.maximum(lengths, 1e-12)).mean())


def _entry(one: VerifiedEngine, latency: tuple[BatchLatency, ...], cosine: float) -> GammaEntry:
    architecture, layers = one.module.model.architecture, one.module.layers
    return GammaEntry(
        gamma=one.module.gamma,
        folder=folder_of(one.module.gamma),
        precision=one.precision,
        tokens=output_tokens(layers, architecture.prefix),
        memory_mb=round(
            activation_mb(
                layers, architecture.width, architecture.heads, architecture.hidden_width, architecture.prefix
            ),
            3,
        ),
        max_error=one.deviation.max_error,
        min_cosine=one.deviation.min_cosine,
        agreement=one.agreement.share if one.agreement else None,
        cosine=cosine,
        latency=latency,
    )


def _tolerance(precision: str, entries: list[GammaEntry]) -> str:
    tolerance = f"cosine with the reference at least {MIN_COSINE[precision]} for every image"
    compared = ", ".join(str(entry.gamma) for entry in entries if entry.agreement is not None)
    if compared:
        tolerance += f"; at least {MIN_AGREEMENT:.0%} of the reference's labels: gamma {compared}"
    others = ", ".join(str(entry.gamma) for entry in entries if entry.precision != precision)
    if others:
        tolerance += f"; f32 and at least {MIN_COSINE['f32']} where {precision} failed: gamma {others}"
    return tolerance
