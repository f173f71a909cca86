"""Models that the last build could not publish, with the reason. `make serve` skips and reports them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from shapeshift import files

FILE_NAME = "failures.json"


def read(build: Path) -> dict[str, str]:
    """Model name to reason, for each model whose last build in the folder `build` failed; empty if none is recorded."""
    try:
        recorded = json.loads((build / FILE_NAME).read_text(encoding="utf-8"))
        return {str(name): str(reason) for name, reason in recorded.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def record(build: Path, failures: Mapping[str, str]) -> None:
    """Replace the recorded failures."""
    path = build / FILE_NAME
    if not failures:
        path.unlink(missing_ok=True)
        return
    files.replace_text(path, json.dumps(dict(failures), indent=1) + "\n")
