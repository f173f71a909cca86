"""vLLM's multi_lora.json: adapters that a model's version folder names, besides those of the registry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from shapeshift.adapter_cache.registry import check_name
from shapeshift.errors import InvalidInputError

FILE = "multi_lora.json"


def read(version: Path) -> dict[str, Path]:
    """The adapters that the file in a version folder names, none where there is no such file.

    Paths are absolute or relative to that folder. Raises InvalidInputError for anything but names with paths.
    """
    file = version / FILE
    if not file.is_file():
        return {}
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(FILE, str(file), f"JSON that can be read ({error})") from None
    valid = isinstance(stated, dict) and all(isinstance(path, str) for path in stated.values())
    if not valid:
        raise InvalidInputError(FILE, str(file), "an object of names and paths")
    return {check_name(name, FILE): version / path for name, path in stated.items()}


def content(named: Mapping[str, Path]) -> str:
    """What the file holds that names these adapters, wherever it lies."""
    paths = {name: str(folder.absolute()) for name, folder in named.items()}
    return json.dumps(paths, indent=2) + "\n"
