"""Progress of a long command, on standard error."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

ProgressCallback = Callable[[str], None]
_BAR = 20


def clear() -> None:
    """Clear the line of a `Progress` on a terminal, before another line is written."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


def say(text: str) -> None:
    """Write a line to standard output at once."""
    clear()
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Write a line to standard error."""
    clear()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Progress:
    """One line that is overwritten on a terminal; elsewhere one line for each stage.

    It shows the seconds since the start, and on a terminal a bar where a step says how many there are, as in `3 of 8`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = time.monotonic()
        self._live = sys.stderr.isatty()
        self._stage = ""

    def __call__(self, step: str) -> None:
        """Show the current step. The text before its first colon names the stage."""
        stage = step.split(":")[0]
        changed = stage != self._stage
        self._stage = stage
        line = f"{self._name}: {time.monotonic() - self._start:4.0f} s  "
        if self._live:
            sys.stderr.write(f"\r\033[K{line}{_bar(step)}{step}")
        elif changed:
            sys.stderr.write(f"{line}{step}\n")
        sys.stderr.flush()

    def done(self) -> None:
        """Clear the line."""
        clear()


def _bar(step: str) -> str:
    """A bar for the last `K of N` of the step, of which K are done; empty without one."""
    counts = re.findall(r"\b(\d+) of (\d+)\b", step)
    if not counts or not int(counts[-1][1]):
        return ""
    done, total = map(int, counts[-1])
    full = _BAR * min(done, total) // total
    return f"[{'#' * full}{'.' * (_BAR - full)}] "
