"""Which folders of a model repository are workers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shapeshift.triton.names import worker_front


def models(repositories: Iterable[Path]) -> tuple[set[str], set[str]]:
    """The models of the repositories that are nobody's workers, and those of them that have workers."""
    names = {file.parent.name for folder in repositories for file in folder.glob("*/config.pbtxt")}
    owners = {name: worker_front(name) for name in names}
    fronts = {name for name, owner in owners.items() if owner not in names}
    return fronts, {owner for owner in owners.values() if owner in fronts}
