"""Progress of a long command, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

ProgressCallback = Callable[[str], None]


class Progress:
    """One line that is overwritten on a terminal; elsewhere one line for each stage.

    It shows the seconds since the start and no bar: how many stages there will be is not known before the last.
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
        line = f"{self._name}: {time.monotonic() - self._start:4.0f} s  {step}"
        if self._live:
            sys.stderr.write(f"\r\033[K{line}")
        elif changed:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def done(self) -> None:
        """Clear the line."""
        sys.stderr.write("\r\033[K" if self._live else "")
