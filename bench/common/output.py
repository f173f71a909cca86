"""What a benchmark prints and writes: build/bench/NAME.txt and NAME.json."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client import hardware
from client.report import head

BUILD = Path("build")
FOLDER = BUILD / "bench"


class Output:
    """The results of one run of `python -m bench.NAME`.

    The head, with command, settings and hardware, is printed first; `say` prints each result when it is there. `save`
    writes all of it, and the records in `data` as JSON. file_name: of the files, without their ending; NAME if empty.
    """

    def __init__(self, name: str, settings: Mapping[str, object], file_name: str = "") -> None:
        self.data: dict[str, Any] = {}
        self._name = file_name or name
        self._settings = {"command": f"python -m bench.{name} {' '.join(sys.argv[1:])}".strip(), **settings}
        self._text: list[str] = []
        self.say(head({"settings": self._settings, "hardware": hardware.describe()}))

    def say(self, text: str) -> None:
        """Print a part of the results, in place of the progress line."""
        progress()
        self._text.append(text)
        print(text, flush=True)

    def save(self, plots: Sequence[str] = ()) -> None:
        """Write everything; `plots` are further files that the run has written to the folder."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{self._name}.txt").write_text("\n".join(self._text) + "\n")
        (FOLDER / f"{self._name}.json").write_text(json.dumps({"settings": self._settings, **self.data}, indent=1))
        print(f"written: {FOLDER}/{', '.join([f'{self._name}.txt', f'{self._name}.json', *plots])}")


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
