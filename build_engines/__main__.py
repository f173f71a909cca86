"""`make engines`: builds, verifies and publishes every model of model_repository/."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from build_engines import cascade, decode
from build_engines.image import front as image_front
from build_engines.image.plan import EmulatedFrontConfig, ImageFrontConfig
from build_engines.paths import BuildPaths
from build_engines.repository import FrontConfig, calls_models, front_folders, read, required_models
from build_engines.text import front as text_front
from build_engines.text.config import TextFrontConfig
from shapeshift import files
from shapeshift.engines import failures as recorded_failures
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.progress import Progress
from shapeshift.token_adapt.model.manifest import ImageManifest

LOCK = ".engines.lock"

Publisher = Callable[[Any, BuildPaths, Progress], None]


def main() -> int:
    """Publish the models. Returns 1, after naming them, if some failed; the others are published all the same."""
    parser = argparse.ArgumentParser(prog="python -m build_engines", description=__doc__)
    parser.add_argument("models", nargs="*", help="only these front models (default: all)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--keep-going", action="store_true", help="exit with 0 if at least one model can be served")
    options = parser.parse_args()
    paths = BuildPaths(Path.cwd(), options.build.resolve(), options.repository.resolve())
    try:
        with files.exclusive_lock(paths.build / LOCK, lambda: _log(f"waiting for another build in {paths.build}")):
            names = [folder.name for folder in front_folders(paths, set(options.models))]
            failures = _publish_all(names, paths)
            failed = [name for name in names if name in failures]
    except ShapeshiftError as error:
        _log(str(error))
        return 1
    if failed:
        _log(f"not published: {', '.join(failed)}")
    return int(failed == names if options.keep_going else bool(failed))


def _publish_all(names: Sequence[str], paths: BuildPaths) -> dict[str, str]:
    """Publish the models. Returns the reason for each model of the repository whose last build failed."""
    others = {folder.name for folder in front_folders(paths, set())} - {*names}
    failures = {name: reason for name, reason in recorded_failures.read(paths.build).items() if name in others}
    fronts: list[FrontConfig] = []
    for name in names:
        with _record_failure(name, paths, failures):
            fronts.append(read(paths.repository / name))
    # A front that calls other models is checked against their published engines.
    fronts.sort(key=calls_models)
    for front in fronts:
        with _record_failure(front.name, paths, failures):
            missing = [name for name in required_models(front, paths) if name in failures]
            if missing:
                raise NotFoundError(f"needs {', '.join(missing)}, which could not be published")
            _publish(front, paths)
    recorded_failures.record(paths.build, failures)
    return failures


@contextlib.contextmanager
def _record_failure(name: str, paths: BuildPaths, failures: dict[str, str]) -> Iterator[None]:
    """Print an error of the model `name` in one line and add it to `failures`, so that the other models are built."""
    try:
        yield
    except ShapeshiftError as error:
        failures[name] = str(error)
    except Exception as error:  # noqa: BLE001  any error of a library concerns this model alone
        log = paths.build / f"{name}.traceback"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        failures[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (traceback in {log})"
    if name in failures:
        print(f"{name}: {failures[name]}", file=sys.stderr)


def _log(text: str) -> None:
    print(f"make engines: {text}", file=sys.stderr, flush=True)


def _publish(front: FrontConfig, paths: BuildPaths) -> None:
    progress = Progress(front.name)
    try:
        _PUBLISHERS[type(front)](front, paths, progress)
    finally:
        progress.done()


def _print_summary(publish: Callable[[Any, BuildPaths], str]) -> Publisher:
    """A publisher that calls `publish` and prints its summary line."""

    def run(front: Any, paths: BuildPaths, progress: Progress) -> None:
        print(f"{front.name}: {publish(front, paths)}")

    return run


def _publish_texts(front: TextFrontConfig, paths: BuildPaths, progress: Progress) -> None:
    result, placement, built = text_front.publish(front, paths, progress)
    progress.done()
    _print_headline(front.name, result, paths.engines / front.name, built)
    if result.note:
        print(result.note)
    print(
        f"{'engine':>9} {'rows':>5} {'max error':>10} {'cosine':>9} {'at tokens':>10} {'median ms':>10} {'p99 ms':>8}"
    )
    for entry in result.engines:
        left = f"{entry.name:>9} {entry.rows or 'any':>5} {entry.max_error:10.1e} {entry.min_cosine:9.6f}"
        for index, point in enumerate(entry.latency):
            shown = left if index == 0 else " " * len(left)
            print(f"{shown} {point.tokens:10} {point.median_ms:10.2f} {point.p99_ms:8.2f}")
    workers = f", {placement.workers} workers" if placement.workers else ""
    print(f"placement {placement.name}{workers}: {placement.reason}")


def _publish_images(front: ImageFrontConfig, paths: BuildPaths, progress: Progress) -> None:
    result, built = image_front.publish(front, paths, progress)
    progress.done()
    _print_headline(front.name, result, paths.engines / front.name, built)
    header = f"{'gamma':>6} {'precision':>9} {'tokens':>7} {'max error':>10} {'cosine':>9}"
    print(f"{header} {'images':>7} {'median ms':>10} {'p99 ms':>8}")
    for entry in result.engines:
        quality = f"{entry.tokens:7} {entry.max_error:10.1e} {entry.min_cosine:9.6f}"
        left = f"{entry.gamma:>6} {entry.precision:>9} {quality}"
        for index, point in enumerate(entry.latency):
            shown = left if index == 0 else " " * len(left)
            print(f"{shown} {point.images:7} {point.median_ms:10.2f} {point.p99_ms:8.2f}")


def _print_headline(name: str, result: Manifest | ImageManifest, folder: Path, built: bool) -> None:
    state = "built" if built else "up to date"
    size = sum(entry.size for entry in result.files.values()) / 1e6
    print(
        f"{name}: {state}; {result.provider} {result.provider_version}, {result.precision}, {size:.0f} MB in {folder}"
    )


_PUBLISHERS: dict[type, Publisher] = {
    TextFrontConfig: _publish_texts,
    decode.DecodeFrontConfig: _print_summary(decode.publish),
    ImageFrontConfig: _publish_images,
    EmulatedFrontConfig: _print_summary(image_front.publish_emulated),
    cascade.CascadeFrontConfig: _print_summary(cascade.publish),
}


if __name__ == "__main__":
    sys.exit(main())
