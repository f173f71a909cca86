"""Builds the engines of an image model in a temporary folder and publishes them, all or nothing."""

from __future__ import annotations

from pathlib import Path

from shapeshift import files
from shapeshift.build_engines.image.labels import MIN_AGREEMENT
from shapeshift.build_engines.image.plan import ImagePlan
from shapeshift.engines import manifest
from shapeshift.engines.gpu import with_cpu
from shapeshift.engines.verify import MIN_COSINE
from shapeshift.progress import ProgressCallback
from shapeshift.token_adapt.model.manifest import GammaEntry, ImageManifest


def build(planned: ImagePlan, target: Path, progress: ProgressCallback) -> ImageManifest:
    """Build the engines of `planned` and move them to `target`. After an error `target` is unchanged."""
    # torch takes seconds to import; a build with nothing to do must not import it.
    from shapeshift.build_engines.image.engines import ImageEngineBuilder

    with files.replace_folder(target) as work:
        builder = ImageEngineBuilder(planned, work, progress)
        entries = builder.build()
        result = _manifest(planned, work, entries, builder.device_mb)
        result.save(work)
    return result


def _manifest(planned: ImagePlan, work: Path, entries: list[GammaEntry], device_mb: float) -> ImageManifest:
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
        files=manifest.list_files(work),
        engines=tuple(entries),
        checkpoint_origin=planned.checkpoint.origin,
        device_mb=device_mb,
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
