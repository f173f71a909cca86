"""What a benchmark prints and writes: build/bench/NAME.txt and NAME.json."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from client import hardware
from client.report import head
from shapeshift.errors import ShapeshiftError
from shapeshift.settings import require
from shapeshift.table import Row, table

BUILD = Path("build")
FOLDER = BUILD / "bench"
P = ParamSpec("P")


class Output:
    """The results of one run of `python -m bench.NAME`.

    The head, with command, settings and hardware, is printed first; `say` prints each result when it is there. `save`
    writes all of it, and as JSON the head with the date and the records in `data`. file_name: of the files, without
    their ending; NAME if empty.
    """

    def __init__(self, name: str, settings: Mapping[str, object], file_name: str = "") -> None:
        self.data: dict[str, Any] = {}
        self._name = file_name or name
        command = f"python -m bench.{name} {' '.join(sys.argv[1:])}".strip()
        self._head = {"settings": {"command": command, **settings}, "hardware": hardware.describe()}
        self._text: list[str] = []
        self.say(head(self._head))

    def say(self, text: str) -> None:
        """Print a part of the results, in place of the progress line."""
        progress()
        self._text.append(text)
        print(text, flush=True)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Print `rows` below their title, and the names of their columns."""
        self.say(table(title, rows))

    def save(self) -> None:
        """Write everything."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        record = {**self._head, "date": time.strftime("%Y-%m-%d"), **self.data}
        (FOLDER / f"{self._name}.txt").write_text("\n".join(self._text) + "\n")
        (FOLDER / f"{self._name}.json").write_text(json.dumps(record, indent=1, default=float))
        print(f"written: {FOLDER}/{self._name}.txt, {self._name}.json")


def program(main: Callable[P, int]) -> Callable[P, int]:
    """`main` with 2 as the exit status, and a line on standard error, for a ShapeshiftError."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except ShapeshiftError as error:
            progress()
            print(f"bench: {error}", file=sys.stderr)
            return 2

    return run


def parser(name: str, about: str | None, quick: str = "", parts: Sequence[str] = (), usual: int = 0) -> ArgumentParser:
    """The options that benchmarks share: --seed; --quick, which is said to do `quick`; and --parts, some of `parts`.

    about: the module's text, whose first line the help shows; usual: how many of the parts are measured by default.
    """
    options = ArgumentParser(prog=f"python -m bench.{name}", description=(about or "").splitlines()[0])
    options.add_argument("--seed", type=int, default=0)
    if quick:
        options.add_argument("--quick", action="store_true", help=quick)
    if parts:
        words = f"some of {','.join(parts)} (%(default)s)"
        options.add_argument(
            "--parts", type=functools.partial(_names, parts), default=",".join(parts[: usual or None]), help=words
        )
    return options


def _names(parts: Sequence[str], text: str) -> list[str]:
    """The names of parts in `text`, separated by commas."""
    names = text.split(",")
    for name in names:
        require(name in parts, "--parts", name, f"some of {', '.join(parts)}")
    return names


def name_of_parts(name: str, parts: Sequence[str], usual: Sequence[str]) -> str:
    """The name of the files of a run: `name`, followed by the parts where they are not the `usual` ones.

    So a run of one part leaves the results of a whole run as they are.
    """
    return name if set(parts) == set(usual) else "-".join([name, *parts])


def progress(text: str = "") -> None:
    """Show what is measured now on standard error: on a terminal one line that is written over."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
    elif text:
        print(text, file=sys.stderr, flush=True)


def empty(folder: Path) -> None:
    """Make `folder` anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
