"""Which models the last builds could not publish, and why: what `make serve` leaves out and names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from shapeshift import files

FILE_NAME = "failures.json"


def read(build: Path) -> dict[str, str]:
    """The reason of each model of the build folder `build` whose last build failed; none where nothing is recorded."""
    try:
        found = json.loads((build / FILE_NAME).read_text(encoding="utf-8"))
        return {str(name): str(reason) for name, reason in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def record(build: Path, failures: Mapping[str, str]) -> None:
    """Let `failures` be what `read` answers from now on."""
    path = build / FILE_NAME
    if not failures:
        path.unlink(missing_ok=True)
        return
    files.replace_text(path, json.dumps(dict(failures), indent=1) + "\n")
