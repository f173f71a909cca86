"""What the build checks of a model before it builds anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shapeshift.build_engines.build_steps import steps_of
from shapeshift.build_engines.model_folder import CONFIG
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import read
from shapeshift.build_engines.text.workers import check_name
from shapeshift.errors import NotFoundError


def validate(name: str, fronts: Collection[str], paths: BuildPaths) -> Any:
    """Raise the error with which `make engines` would refuse the model `name` before it builds anything.

    fronts: the names of all front models of the repository. Returns what the check of its technique found.
    """
    check_name(name, fronts)
    front = read(paths.repository / name)
    steps = steps_of(front)
    found = steps.check(front, paths)
    for required in steps.required(front, paths):
        if required not in fronts:
            raise NotFoundError(f"needs the model {required}: no {paths.repository / required / CONFIG}")
    return found
