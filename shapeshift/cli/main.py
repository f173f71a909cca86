"""The `shapeshift` command: it runs the module of the given command."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import shapeshift
from shapeshift.errors import ShapeshiftError

# Command: (module with add_arguments(parser) and run(options) -> exit status, summary).
COMMANDS = {
    "setup": ("shapeshift.cli.setup", "download and unpack Triton, perf_analyzer and the demo checkpoints"),
    "engines": ("shapeshift.cli.engines", "build, verify and publish the models of a model repository"),
    "add": ("shapeshift.cli.add", "serve a checkpoint: write its models, build and load them if a server runs"),
    "convert": ("shapeshift.cli.convert", "make safetensors of weights in pickles, without running their code"),
    "validate": ("shapeshift.cli.validate", "check the models of a model repository without building them"),
    "doctor": ("shapeshift.cli.doctor", "show what this machine and installation can do, and why not"),
    "serve": ("shapeshift.cli.serve", "start Triton with the generated models"),
    "reload": ("shapeshift.cli.running.reload", "load models of a running server again, as their files are now"),
    "examples": ("shapeshift.cli.examples", "print how to call the models"),
    "gateway": ("shapeshift.cli.gateway", "serve the OpenAI, rerank and TEI APIs in front of servers"),
    "sidecar": ("shapeshift.cli.sidecar", "assign bins to workers and reload dead models; `serve` starts it"),
    "status": ("shapeshift.cli.running.status", "show what is served: fronts, workers, traffic and plan"),
    "live": ("shapeshift.cli.running.live", "serve a page that shows what the techniques do"),
    "fleet": ("shapeshift.fleet.cli.main", "many machines behind one front: show what they serve"),
    "adapters": ("shapeshift.cli.registries.adapters", "LoRA adapters of a model that serves: add, list, pin, remove"),
    "tasks": ("shapeshift.cli.registries.tasks", "the tasks of an image model: train, register, list, remove"),
    "cascade": ("shapeshift.cli.registries.cascade", "profile cascades of models and choose which one serves"),
    "policy": ("shapeshift.cli.policy", "compute one decision of a policy, from JSON"),
    "plan": ("shapeshift.cli.planning.plan", "the cheapest workers that hold an objective for a load"),
    "record": ("shapeshift.cli.planning.record", "write a trace of what arrives at a running server, without texts"),
    "simulate": ("shapeshift.cli.planning.simulate", "serve a load in simulation, by the policies that serve"),
}
# Option that a former version of a command had: what to do instead, the end of a sentence.
REMOVED_OPTIONS: dict[str, dict[str, str]] = {
    "serve": {
        "--allow-public": "set SHAPESHIFT_ALLOW_PUBLIC=1 in the environment",
        "--external": "`shapeshift reload --server HOST:PORT MODEL` loads models into a running server",
    },
    "engines": {"--store": "copy build/engines to the other machine, where `shapeshift engines` keeps what is current"},
    "cascade": {
        **dict.fromkeys(("--url", "--metrics", "--front"), "load further levels with `shapeshift reload` before"),
        "--reliability": "leave it out, the candidate table has the numbers",
    },
    "sidecar": {
        "--health-period": "leave it out, servers are looked at each second, or as often as they answer",
        "--scale-period": "leave it out, the tail latency is checked every 10 s",
        "--batch": "leave it out, an eighth of the workers is changed at once",
    },
    "gateway": {
        "--max-body-mb": "leave it out, bodies have at most 32 MiB, and a proxy may allow less",
        "--max-connections": "--max-requests bounds what a server has to do",
        "--registry": "--adapter-root lets requests change the adapters of --build",
    },
    "fleet": {
        "--timeout": "leave it out, of an upgrade each node has half an hour",
        "--models-claim": "the claim is NAME-models; edit what is printed for another one",
        "--requests-waiting": "edit the threshold in what is printed",
        "--shared-memory": "edit the sizeLimit of shm in what is printed",
    },
}
# What a full, a read-only or a broken disk says, or a folder of another user.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    2 after one line on standard error for a ShapeshiftError or a disk that is full or read-only, 130 after one line for
    Ctrl-C, 141 if the reader of the output has ended, as for a program that SIGPIPE ends.
    """
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # Python looks for garbage once more when it ends: two seconds among the objects of torch and transformers.
        atexit.register(gc.freeze)
    try:
        return _run(command_line)
    except KeyboardInterrupt:
        sys.stderr.write(f"shapeshift {' '.join(command_line[:1])}: interrupted\n")
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(command_line: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="shapeshift", description=shapeshift.__doc__)
    parser.add_argument("--version", action="version", version=f"shapeshift {shapeshift.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Import only the requested command: the packages that another one needs may not be installed.
        if name in command_line[:1]:
            importlib.import_module(module).add_arguments(command)
    options, unknown = parser.parse_known_args(command_line)
    try:
        _refuse(unknown, REMOVED_OPTIONS.get(options.command, {}))
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        status = int(importlib.import_module(COMMANDS[options.command][0]).run(options))
        sys.stdout.flush()
        return status
    except ShapeshiftError as error:
        sys.stderr.write(f"shapeshift {options.command}: {error}\n")
        return 2
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f" {error.filename}" if error.filename else ""
        sys.stderr.write(f"shapeshift {options.command}: cannot write or read{where}: {error.strerror}\n")
        return 2


def _refuse(arguments: Sequence[str], removed: Mapping[str, str]) -> None:
    """Raise ShapeshiftError for the first of `arguments` that is an option of a former version."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in removed:
            raise ShapeshiftError(f"{option} is gone: {removed[option]}")


if __name__ == "__main__":
    sys.exit(main())
