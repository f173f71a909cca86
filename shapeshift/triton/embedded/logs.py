"""Reads a server log: the errors at its end, and the models that were loaded."""

from __future__ import annotations

import re
from pathlib import Path

_ENTRY = re.compile(r"^[IWEF]\d{4} ")
_FAILURE = re.compile(r"^[EF]\d{4} |^error[: ]|error while loading shared libraries")
_LOADED = re.compile(r"^I\d{4} .*successfully loaded '([^']+)'", re.MULTILINE)
# The server logs these as errors at every start on a machine without a GPU.
_HARMLESS = re.compile(r"CudaDriverHelper|DCGM|nvml", re.IGNORECASE)


def loaded_models(log: Path) -> list[str]:
    """The models in the order in which the server has loaded them; a model that was loaded again is named again."""
    try:
        return _LOADED.findall(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []


def last_errors(log: Path, limit: int = 8, tail_bytes: int = 1 << 16) -> list[str]:
    """Up to `limit` lines: the last errors in `log` with their continuation lines; without errors, its last lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - tail_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    kept: list[str] = []
    inside = False
    for line in lines:
        if not line.strip():
            continue
        if _FAILURE.search(line):
            inside = _HARMLESS.search(line) is None
        elif _ENTRY.match(line) or line[0] in "+|":
            inside = False
        if inside:
            kept.append(line.rstrip())
    return kept[-limit:] or [line.rstrip() for line in lines if line.strip()][-limit:]
