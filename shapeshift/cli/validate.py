"""`shapeshift validate`: checks the models of a model repository without building them."""

from __future__ import annotations

import argparse
import sys

from shapeshift.build_engines.description import describe
from shapeshift.build_engines.model_folder import CONFIG
from shapeshift.build_engines.publish import validate
from shapeshift.build_engines.repository import front_folders, read
from shapeshift.cli import engines
from shapeshift.engines import capacity
from shapeshift.engines.capacity import Ask
from shapeshift.serving.error_codes import code_name, text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift validate`."""
    engines.add_repository_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Write one line for each model; returns 1 if `make engines` would refuse one of them.

    A model that does not fit in the memory beside those before it is said to: `shapeshift serve` leaves it out here.
    """
    paths = engines.paths_of(options)
    fronts = {folder.name for folder in front_folders(paths, set())}
    refused, asks, machine = 0, list[Ask](), capacity.this_machine()
    for folder in front_folders(paths, set(options.models)):
        try:
            checked = validate(folder.name, fronts, paths)
            asks.append(describe(read(folder), checked)[1])
            misfit = capacity.fit(asks, machine)[1].get(folder.name)
            line = f"{folder.name}: OK" + (f", but it does not fit here: {misfit}" if misfit else "")
        except Exception as error:  # noqa: BLE001  any error of a library concerns this model alone
            refused += 1
            file = options.repository / folder.name / CONFIG
            reason = text_of(error).partition("\n")[0].replace(str(folder / CONFIG), str(file))
            where = "" if reason.startswith(f"{file}:") else f"{file}: "
            line = f"{folder.name}: {code_name(error)}: {where}{reason}"
        sys.stdout.write(f"{line}\n")
    return int(refused > 0)
