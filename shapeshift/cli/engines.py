"""`shapeshift engines`: builds, verifies and publishes the models of a model repository."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path

from shapeshift import files
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.publish import in_one_line, publish_all, with_required
from shapeshift.build_engines.repository import front_folders
from shapeshift.child_process import add_until_eof, at_end_of_input
from shapeshift.cli.running import memory
from shapeshift.cli.running.server import Loader, running_server
from shapeshift.cli.stop_signals import stop_on_sigterm
from shapeshift.errors import EngineError, NotFoundError, ShapeshiftError
from shapeshift.progress import say, warn
from shapeshift.sidecar import run_files

LOCK = ".engines.lock"
MODEL_REPOSITORY = Path("model_repository")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift engines`."""
    add_repository_arguments(parser)
    parser.add_argument("--keep-going", action="store_true", help="exit with 0 if at least one model can be served")
    parser.add_argument("--load", action="store_true", help="load each model into the server of the build folder")
    add_until_eof(parser)
    parser.add_argument("--brief", action="store_true", help="print one line a model, without the tables of engines")


def add_repository_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose models of a model repository, and the build folder; see `paths_of`."""
    parser.add_argument("models", nargs="*", help="only these front models (default: all)")
    parser.add_argument("--repository", type=Path, default=MODEL_REPOSITORY)
    parser.add_argument("--build", type=Path, default=Path("build"))


def paths_of(options: argparse.Namespace) -> BuildPaths:
    """The folders that the options name."""
    return BuildPaths(Path.cwd(), options.build.resolve(), options.repository.resolve())


def run(options: argparse.Namespace) -> int:
    """Publish the models. Returns 1, after naming them, if some failed; the others are published.

    Raises ShapeshiftError, also for an unexpected error outside of any model.
    """
    paths = paths_of(options)
    try:
        with stop_on_sigterm("engines"):
            if options.until_eof:
                at_end_of_input(lambda: os.kill(os.getpid(), signal.SIGTERM))
            return _publish(options, paths)
    except ShapeshiftError:
        raise
    except Exception as error:
        raise EngineError(f"the build ended early: {in_one_line(error, paths.build / 'engines.traceback')}") from error


def _publish(options: argparse.Namespace, paths: BuildPaths) -> int:
    with contextlib.ExitStack() as stack:
        loader = _loader(options, paths, stack) if options.load else None
        with files.exclusive_lock(paths.build / LOCK, lambda: warn(f"waiting for another build in {paths.build}")):
            # Where all else is read-only, what a machine compiles for itself is mounted here.
            (paths.build / "kernels").mkdir(exist_ok=True)
            selected = [folder.name for folder in front_folders(paths, set(options.models))]
            names = with_required(selected, paths, warn)
            published = _say_first_line if options.brief else say
            start = loader.start if loader else lambda name: None
            failures = publish_all(names, paths, published, failed=warn, done=start)
    failed = [name for name in names if name in failures]
    if failed:
        warn(f"not published: {', '.join(failed)}")
    if loader is not None:
        failed = [name for name in names if name not in loader.loaded]
    else:
        served = sorted(run_files.repository_models([paths.generated])[0] - set(failures))
        for name, reason in memory.plan([paths.generated], served)[1].items():
            warn(f"{name} does not fit in what is available now, `shapeshift serve` leaves it out: {reason}")
    return int(failed == names if options.keep_going else bool(failed))


def _loader(options: argparse.Namespace, paths: BuildPaths, stack: contextlib.ExitStack) -> Loader:
    server = stack.enter_context(running_server(options.build))
    if server is None:
        raise NotFoundError(f"--load: no server runs on {options.build}; start one with `shapeshift serve`")
    return stack.enter_context(Loader(server.load, paths.generated, warn))


def _say_first_line(text: str) -> None:
    say(text.partition("\n")[0])
