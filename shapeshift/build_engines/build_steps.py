"""What `make engines` does with each kind of front model: one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shapeshift.build_engines import cascade, decode
from shapeshift.build_engines.image import front as image_front
from shapeshift.build_engines.image.plan import EmulatedFrontConfig, ImageFrontConfig
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import FrontConfig
from shapeshift.build_engines.text import front as text_front
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.engines.manifest import Manifest
from shapeshift.progress import Progress
from shapeshift.token_adapt.model.manifest import ImageManifest


@dataclass(frozen=True)
class BuildSteps:
    """How one kind of front model is built.

    check     raises what the build refuses before it builds anything; `publish` begins with it
    publish   builds, verifies and writes the model's folder; returns its summary
    required  the models that the front calls, which must be published before it
    """

    check: Callable[[Any, BuildPaths], Any]
    publish: Callable[[Any, BuildPaths, Progress], str]
    required: Callable[[Any, BuildPaths], Sequence[str]]


def steps_of(front: FrontConfig) -> BuildSteps:
    """The steps of a front model that `repository.read` has read."""
    return _STEPS[type(front)]


def _no_models(_front: FrontConfig, _paths: BuildPaths) -> Sequence[str]:
    return ()


def _publish_texts(front: TextFrontConfig, paths: BuildPaths, progress: Progress) -> str:
    result, placement, how = text_front.publish(front, paths, progress)
    lines = [_headline(front.name, result, paths, how)]
    if result.note:
        lines.append(result.note)
    header = f"{'engine':>9} {'rows':>5} {'max error':>10} {'cosine':>9}"
    lines.append(f"{header} {'at tokens':>10} {'median ms':>10} {'p99 ms':>8}")
    for entry in result.engines:
        left = f"{entry.name:>9} {entry.rows or 'any':>5} {entry.max_error:10.1e} {entry.min_cosine:9.6f}"
        times = [f"{point.tokens:10} {point.median_ms:10.2f} {point.p99_ms:8.2f}" for point in entry.latency]
        lines += _beside(left, times)
    workers = f", {placement.workers} workers" if placement.workers else ""
    return "\n".join([*lines, f"placement {placement.name}{workers}: {placement.reason}"])


def _publish_images(front: ImageFrontConfig, paths: BuildPaths, progress: Progress) -> str:
    result, how = image_front.publish(front, paths, progress)
    header = (
        f"{'gamma':>6} {'precision':>9} {'tokens':>7} {'max error':>10} {'cosine':>9} {'labels':>7} {'to gamma 0':>10}"
    )
    lines = [_headline(front.name, result, paths, how), f"{header} {'images':>7} {'median ms':>10} {'p99 ms':>8}"]
    for entry in result.engines:
        labels = "" if entry.agreement is None else f"{entry.agreement:.1%}"
        to_0 = f"{entry.cosine:.4f}" if entry.gamma <= 0 else ""
        quality = f"{entry.tokens:7} {entry.max_error:10.1e} {entry.min_cosine:9.6f} {labels:>7} {to_0:>10}"
        left = f"{entry.gamma:>6} {entry.precision:>9} {quality}"
        times = [f"{point.images:7} {point.median_ms:10.2f} {point.p99_ms:8.2f}" for point in entry.latency]
        lines += _beside(left, times)
    return "\n".join([*lines, f"serves {image_front.served(result)}"])


def _beside(left: str, times: list[str]) -> list[str]:
    """The lines `times`, the first of them right of `left`."""
    return [f"{left if index == 0 else ' ' * len(left)} {line}" for index, line in enumerate(times)]


def _headline(name: str, result: Manifest | ImageManifest, paths: BuildPaths, how: str) -> str:
    size, folder = sum(entry.size for entry in result.files.values()) / 1e6, paths.engines / name
    return f"{name}: {how}; {result.provider} {result.provider_version}, {result.precision}, {size:.0f} MB in {folder}"


def _publish_decode(front: decode.DecodeFrontConfig, paths: BuildPaths, progress: Progress) -> str:
    return f"{front.name}: {decode.publish(front, paths, progress)}"


def _with_line(publish: Callable[[Any, BuildPaths], str]) -> Callable[[Any, BuildPaths, Progress], str]:
    """A publisher whose summary is the line that `publish` returns."""
    return lambda front, paths, progress: f"{front.name}: {publish(front, paths)}"


_STEPS: dict[type, BuildSteps] = {
    TextFrontConfig: BuildSteps(text_front.check, _publish_texts, _no_models),
    decode.DecodeFrontConfig: BuildSteps(decode.check, _publish_decode, lambda front, _: decode.forwards_to(front)),
    ImageFrontConfig: BuildSteps(image_front.check, _publish_images, _no_models),
    EmulatedFrontConfig: BuildSteps(image_front.check_emulated, _with_line(image_front.publish_emulated), _no_models),
    cascade.CascadeFrontConfig: BuildSteps(cascade.check, _with_line(cascade.publish), cascade.levels),
}
