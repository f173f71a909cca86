"""`make engines`: everything that model_repository/*/config.pbtxt asks for, built once and verified."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from build_engines import cascade, decode
from build_engines.plan import is_current, plan
from build_engines.publish import build
from build_engines.repository import Front, front_models, generate
from build_engines.settings import Places
from shapeshift.engines import manifest
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import ShapeshiftError

_BAR = 24


class Progress:
    """One line on a terminal that is written over; one line a step elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = time.monotonic()
        self._live = sys.stderr.isatty()
        self._steps = 0

    def __call__(self, step: str) -> None:
        """Show what is done now."""
        self._steps += 1
        filled = min(self._steps, _BAR - 1)
        line = f"{self._name}: [{'#' * filled}{'.' * (_BAR - filled)}] {time.monotonic() - self._start:4.0f} s {step}"
        sys.stderr.write(f"\r\033[K{line}" if self._live else f"{line}\n")
        sys.stderr.flush()

    def done(self) -> None:
        """End the line."""
        sys.stderr.write("\r\033[K" if self._live else "")


def main() -> int:
    """Build what is not current; 1 and the names of what failed, after everything else was built."""
    parser = argparse.ArgumentParser(prog="python -m build_engines", description=__doc__)
    parser.add_argument("models", nargs="*", help="only these front models (default: all)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--build", type=Path, default=Path("build"))
    options = parser.parse_args()
    places = Places(Path.cwd(), options.build.resolve(), options.repository.resolve())
    try:
        fronts = front_models(places, set(options.models))
    except ShapeshiftError as error:
        print(f"make engines: {error}", file=sys.stderr)
        return 1
    # A cascade is held against the engines of its levels.
    fronts.sort(key=lambda front: isinstance(front, cascade.CascadeFront))
    failed = [front.name for front in fronts if not _bring_up_to_date(front, places)]
    if failed:
        print(f"make engines: not published: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _bring_up_to_date(front: Front, places: Places) -> bool:
    if isinstance(front, decode.DecodeFront | cascade.CascadeFront):
        try:
            done = (
                decode.publish(front, places)
                if isinstance(front, decode.DecodeFront)
                else cascade.publish(front, places)
            )
            print(f"{front.name}: {done}")
        except ShapeshiftError as error:
            print(f"{front.name}: {error}", file=sys.stderr)
            return False
        return True
    target = places.engines / front.name
    progress = Progress(front.name)
    try:
        planned = plan(front, places)
        fresh = not is_current(planned, target)
        made = build(planned, target, progress) if fresh else manifest.load(target)
        placed = generate(planned, target, made, places)
    except ShapeshiftError as error:
        progress.done()
        print(f"{front.name}: {error}", file=sys.stderr)
        return False
    progress.done()
    _table(front.name, made, target, fresh)
    print(f"placement {placed.name}{f', {placed.workers} workers' if placed.workers else ''}: {placed.reason}")
    return True


def _table(name: str, made: Manifest, target: Path, fresh: bool) -> None:
    state = "built" if fresh else "up to date"
    size = sum(entry.size for entry in made.files.values()) / 1e6
    print(f"{name}: {state}; {made.provider} {made.provider_version}, {made.precision}, {size:.0f} MB in {target}")
    print(
        f"{'engine':>9} {'rows':>5} {'max error':>10} {'cosine':>9} {'at tokens':>10} {'median ms':>10} {'p99 ms':>8}"
    )
    for entry in made.engines:
        for index, point in enumerate(entry.latency):
            left = f"{entry.name:>9} {entry.rows or 'any':>5} {entry.max_error:10.1e} {entry.min_cosine:9.6f}"
            print(f"{left if index == 0 else ' ' * 36} {point.tokens:10} {point.median_ms:10.2f} {point.p99_ms:8.2f}")


if __name__ == "__main__":
    sys.exit(main())
