"""`make engines`: everything that model_repository/*/config.pbtxt asks for, built once and verified."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from build_engines import cascade, decode, images
from build_engines.plan import is_current, plan
from build_engines.publish import build
from build_engines.repository import Front, front_models, generate
from build_engines.settings import FrontModel, Places
from shapeshift import files
from shapeshift.engines import manifest
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import ShapeshiftError
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
    options = parser.parse_args()
    places = Places(Path.cwd(), options.build.resolve(), options.repository.resolve())
    try:
        with files.exclusive(places.build / LOCK, lambda: _say(f"waits for another one in {places.build}")):
            return _make(places, set(options.models))
    except ShapeshiftError as error:
        _say(str(error))
        return 1


def _make(places: Places, models: set[str]) -> int:
    fronts = front_models(places, models)
    # A cascade is held against the engines of its levels.
    fronts.sort(key=lambda front: isinstance(front, cascade.CascadeFront))
    failed = [front.name for front in fronts if not _bring_up_to_date(front, places)]
    if failed:
        _say(f"not published: {', '.join(failed)}")
    return 1 if failed else 0


def _say(what: str) -> None:
    print(f"make engines: {what}", file=sys.stderr, flush=True)


def _bring_up_to_date(front: Front, places: Places) -> bool:
    progress = Progress(front.name)
    try:
        _KINDS[type(front)](front, places, progress)
    except ShapeshiftError as error:
        progress.done()
        print(f"{front.name}: {error}", file=sys.stderr)
        return False
    return True


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
    print(f"{'gamma':>6} {'tokens':>7} {'max error':>10} {'cosine':>9} {'images':>7} {'median ms':>10} {'p99 ms':>8}")
    for entry in made.engines:
        left = f"{entry.gamma:>6} {entry.tokens:7} {entry.max_error:10.1e} {entry.min_cosine:9.6f}"
        for index, point in enumerate(entry.latency):
            shown = left if index == 0 else " " * len(left)
            print(f"{shown} {point.images:7} {point.median_ms:10.2f} {point.p99_ms:8.2f}")


def _table(name: str, made: Manifest, target: Path, fresh: bool) -> None:
    _headline(name, made, target, fresh)
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
