"""What the sidecar last decided, in a file for people and tools: informational, safe to delete, never read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shapeshift import files

FILE = "scheduler.json"


def write(run_directory: Path, values: dict[str, Any]) -> None:
    """Replace the report in one step. Raises OSError."""
    files.replace_text(run_directory / FILE, json.dumps(values, indent=1) + "\n")


def read(run_directory: Path) -> dict[str, Any]:
    """The last report; empty without one, or for one that is damaged."""
    try:
        values = json.loads((run_directory / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
