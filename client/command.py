"""The command line of the replayer. It prints a table and writes a JSON file if requested."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from client import hardware, report
from client.open_loop import ReplayError, replay
from client.plan import Settings, plan
from shapeshift.errors import InvalidInputError
from shapeshift.settings import read

FAILED, INVALID = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay as the options say and print the report.

    Returns 0, 1 if no request succeeds or the server does not answer, or 2 for invalid options or files.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = vars(_parser().parse_args(words))
    try:
        settings = read(Settings, {name: value for name, value in options.items() if value is not None})
        requests = plan(settings)
    except (InvalidInputError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return INVALID

    sections: dict[str, str | dict[str, object]] = {
        "command": shlex.join(["python", "client/replay.py", *words]),
        "settings": dataclasses.asdict(settings),
        "client_hardware": hardware.describe(),
    }
    print(report.head(sections), end="\n\n", flush=True)
    try:
        result = asyncio.run(
            replay(
                settings.url,
                settings.model,
                requests,
                timeout_s=settings.timeout_s,
                drain_s=settings.drain_s,
                max_in_flight=settings.max_in_flight,
                warmup=settings.warmup,
                connect_timeout_s=settings.connect_timeout_s,
            )
        )
    except InvalidInputError as error:
        print(f"replay: {error}", file=sys.stderr)
        return INVALID
    except ReplayError as error:
        print(f"replay: {error}", file=sys.stderr)
        return FAILED
    summary = result.summary(None if settings.slo_ms is None else settings.slo_ms / 1e3)
    print(report.table(summary, result.messages))
    if settings.json:
        report.write_json(Path(settings.json), summary, result.messages, sections)
    return 0 if summary.ok else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay", description="Replay an open-loop trace of texts against a model over gRPC."
    )
    for field in dataclasses.fields(Settings):
        default = "" if field.default in (None, "") else f" (default: {field.default})"
        text = field.metadata["help"].replace("%", "%%") + default
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=text, metavar="")
    return parser
