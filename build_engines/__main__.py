"""`make engines`: everything that model_repository/*/config.pbtxt asks for, built once and verified."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from build_engines import cascade, decode, images
from build_engines.plan import is_current, plan
from build_engines.publish import build
from build_engines.repository import Front, asks_others, front_folders, generate, needs, read
from build_engines.settings import FrontModel, Places
from shapeshift import files
from shapeshift.engines import failures as failed_builds
from shapeshift.engines import manifest
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.progress import Progress
from shapeshift.token_adapt.image_manifest import ImageManifest

LOCK = ".engines.lock"

Kind = Callable[[Any, Places, Progress], None]


def main() -> int:
    """Build what is not current; 1 and the names of what failed, after everything else was built."""
    parser = argparse.ArgumentParser(prog="python -m build_engines", description=__doc__)
    parser.add_argument("models", nargs="*", help="only these front models (default: all)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--keep-going", action="store_true", help="exit with 0 if at least one model can be served")
    options = parser.parse_args()
    places = Places(Path.cwd(), options.build.resolve(), options.repository.resolve())
    try:
        with files.exclusive(places.build / LOCK, lambda: _say(f"waits for another one in {places.build}")):
            asked = [folder.name for folder in front_folders(places, set(options.models))]
            failed = [name for name in asked if name in _make(places, asked)]
    except ShapeshiftError as error:
        _say(str(error))
        return 1
    if failed:
        _say(f"not published: {', '.join(failed)}")
    return int(failed == asked if options.keep_going else bool(failed))


def _make(places: Places, names: Sequence[str]) -> dict[str, str]:
    """Bring the models up to date; the reason of each model that could not be, those of earlier builds included."""
    known = {folder.name for folder in front_folders(places, set())}
    failures = {name: why for name, why in failed_builds.read(places.build).items() if name in known - {*names}}
    fronts: list[Front] = []
    for name in names:
        with _contained(name, places, failures):
            fronts.append(read(places.repository / name))
    # A model that asks others is held against what these were built as.
    fronts.sort(key=asks_others)
    for front in fronts:
        with _contained(front.name, places, failures):
            missing = [name for name in needs(front, places) if name in failures]
            if missing:
                raise NotFoundError(f"needs {', '.join(missing)}, which could not be published")
            _bring_up_to_date(front, places)
    failed_builds.record(places.build, failures)
    return failures


@contextlib.contextmanager
def _contained(name: str, places: Places, failures: dict[str, str]) -> Iterator[None]:
    """Let nothing that goes wrong with the model `name` reach the others: say it in one line and keep it."""
    try:
        yield
    except ShapeshiftError as error:
        failures[name] = str(error)
    except Exception as error:  # noqa: BLE001  whatever a library raises for a checkpoint concerns this model alone
        log = places.build / f"{name}.traceback"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        failures[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (traceback in {log})"
    if name in failures:
        print(f"{name}: {failures[name]}", file=sys.stderr)


def _say(what: str) -> None:
    print(f"make engines: {what}", file=sys.stderr, flush=True)


def _bring_up_to_date(front: Front, places: Places) -> None:
    progress = Progress(front.name)
    try:
        _KINDS[type(front)](front, places, progress)
    finally:
        progress.done()


def _said(publish: Callable[[Any, Places], str]) -> Kind:
    """A kind of front that is brought up to date in one step and told of in one line."""

    def bring(front: Any, places: Places, progress: Progress) -> None:
        print(f"{front.name}: {publish(front, places)}")

    return bring


def _texts(front: FrontModel, places: Places, progress: Progress) -> None:
    target = places.engines / front.name
    planned = plan(front, places)
    fresh = not is_current(planned, target)
    made = build(planned, target, progress) if fresh else manifest.load(target)
    placed = generate(planned, target, made, places)
    progress.done()
    _table(front.name, made, target, fresh)
    print(f"placement {placed.name}{f', {placed.workers} workers' if placed.workers else ''}: {placed.reason}")


def _images(front: images.ImageFront, places: Places, progress: Progress) -> None:
    made, fresh = images.publish(front, places, progress)
    progress.done()
    _headline(front.name, made, places.engines / front.name, fresh)
    header = f"{'gamma':>6} {'precision':>9} {'tokens':>7} {'max error':>10} {'cosine':>9}"
    print(f"{header} {'images':>7} {'median ms':>10} {'p99 ms':>8}")
    for entry in made.engines:
        quality = f"{entry.tokens:7} {entry.max_error:10.1e} {entry.min_cosine:9.6f}"
        left = f"{entry.gamma:>6} {entry.precision:>9} {quality}"
        for index, point in enumerate(entry.latency):
            shown = left if index == 0 else " " * len(left)
            print(f"{shown} {point.images:7} {point.median_ms:10.2f} {point.p99_ms:8.2f}")


def _table(name: str, made: Manifest, target: Path, fresh: bool) -> None:
    _headline(name, made, target, fresh)
    if made.note:
        print(made.note)
    print(
        f"{'engine':>9} {'rows':>5} {'max error':>10} {'cosine':>9} {'at tokens':>10} {'median ms':>10} {'p99 ms':>8}"
    )
    for entry in made.engines:
        for index, point in enumerate(entry.latency):
            left = f"{entry.name:>9} {entry.rows or 'any':>5} {entry.max_error:10.1e} {entry.min_cosine:9.6f}"
            print(f"{left if index == 0 else ' ' * 36} {point.tokens:10} {point.median_ms:10.2f} {point.p99_ms:8.2f}")


def _headline(name: str, made: Manifest | ImageManifest, target: Path, fresh: bool) -> None:
    state = "built" if fresh else "up to date"
    size = sum(entry.size for entry in made.files.values()) / 1e6
    print(f"{name}: {state}; {made.provider} {made.provider_version}, {made.precision}, {size:.0f} MB in {target}")


_KINDS: dict[type, Kind] = {
    FrontModel: _texts,
    decode.DecodeFront: _said(decode.publish),
    images.ImageFront: _images,
    images.EmulatedFront: _said(images.publish_emulated),
    cascade.CascadeFront: _said(cascade.publish),
}


if __name__ == "__main__":
    sys.exit(main())
