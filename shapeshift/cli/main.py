"""The `shapeshift` command: it only collects what the parts offer."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import shapeshift
from shapeshift.errors import ShapeshiftError

# Command: (module with add_arguments(parser) and run(options) -> exit status, what it does).
COMMANDS = {
    "serve": ("shapeshift.cli.serve", "start Triton with the generated models"),
    "scheduler": ("shapeshift.cli.scheduler", "give workers their bins and replace what died; `serve` starts it"),
    "status": ("shapeshift.cli.status", "what is served: fronts, workers, load and plan"),
    "adapters": ("shapeshift.cli.adapters", "the LoRA adapters of a model: add, list, pin, remove, while it serves"),
    "tasks": ("shapeshift.cli.tasks", "train a task for an image model, and register it with a server"),
    "cascade": ("shapeshift.cli.cascade", "profile cascades of models and choose which one serves"),
    "policy": ("shapeshift.cli.policy", "take one decision by hand, from JSON"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 and one line on standard error for anything the user can mend."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="shapeshift", description=shapeshift.__doc__)
    parser.add_argument("--version", action="version", version=f"shapeshift {shapeshift.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Only the command that was asked for is imported: the others may need more than is installed.
        if name in given[:1]:
            importlib.import_module(module).add_arguments(command)
    options = parser.parse_args(given)
    try:
        return int(importlib.import_module(COMMANDS[options.command][0]).run(options))
    except ShapeshiftError as error:
        sys.stderr.write(f"shapeshift {options.command}: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
