"""Progress of a long command, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_BAR = 24

ProgressCallback = Callable[[str], None]


class Progress:
    """One line that is overwritten on a terminal; elsewhere one line for each stage."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = time.monotonic()
        self._live = sys.stderr.isatty()
        self._stage = ""
        self._stages = 0

    def __call__(self, step: str) -> None:
        """Show the current step. The text before its first colon names the stage."""
        stage = step.split(":")[0]
        changed = stage != self._stage
        self._stage = stage
        self._stages += changed
        filled = min(self._stages, _BAR - 1)
        line = f"{self._name}: [{'#' * filled}{'.' * (_BAR - filled)}] {time.monotonic() - self._start:4.0f} s {step}"
        if self._live:
            sys.stderr.write(f"\r\033[K{line}")
        elif changed:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def done(self) -> None:
        """Clear the line."""
        sys.stderr.write("\r\033[K" if self._live else "")
