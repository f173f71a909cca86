"""What `make engines` does with each kind of front model: one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shapeshift.build_engines import cascade, decode, summary
from shapeshift.build_engines.image import front as image_front
from shapeshift.build_engines.image.plan import EmulatedFrontConfig, ImageFrontConfig
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import FrontConfig
from shapeshift.build_engines.text import front as text_front
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.progress import Progress


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
    result, placement, made = text_front.publish(front, paths, progress)
    return summary.of_texts(front.name, result, paths.engines / front.name, made, placement)


def _publish_images(front: ImageFrontConfig, paths: BuildPaths, progress: Progress) -> str:
    result, made = image_front.publish(front, paths, progress)
    return summary.of_images(front.name, result, paths.engines / front.name, made)


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
