"""Reads a server log: the errors at its end, and the models that were loaded."""

from __future__ import annotations

import re
from pathlib import Path

_ENTRY = re.compile(r"^[IWEF]\d{4} ")
_FAILURE = re.compile(r"^[EF]\d{4} |^error[: ]|error while loading shared libraries")
_LOADED = re.compile(r"^I\d{4} .*successfully loaded '([^']+)'", re.MULTILINE)
# The server logs these as errors at every start on a machine without a GPU.
_HARMLESS = re.compile(r"CudaDriverHelper|DCGM|nvml", re.IGNORECASE)


class LoadedModels:
    """Follows the log of one server from its beginning; reads each line once."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0

    def new(self) -> list[str]:
        """The models that the server has loaded since the last call, in order; one that was loaded again too."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                written = file.read()
        except OSError:
            return []
        # The last line may be half written.
        lines = written[: written.rfind(b"\n") + 1]
        self._offset += len(lines)
        return _LOADED.findall(lines.decode(errors="replace"))


def last_errors(log: Path, limit: int = 8, tail_bytes: int = 1 << 16) -> list[str]:
    """Up to `limit` lines: the last errors in `log` with their continuation lines; without errors, its last lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - tail_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    errors: list[str] = []
    inside = False
    for line in lines:
        if not line.strip():
            continue
        if _FAILURE.search(line):
            inside = _HARMLESS.search(line) is None
        elif _ENTRY.match(line) or line[0] in "+|":
            inside = False
        if inside:
            errors.append(line.rstrip())
    return errors[-limit:] or [line.rstrip() for line in lines if line.strip()][-limit:]
