"""Registries that config.pbtxt names by a URL: the build reads, and the server keeps up to date, a copy of each."""

from __future__ import annotations

from pathlib import Path

from shapeshift.build_engines.paths import BuildPaths
from shapeshift.errors import InvalidInputError
from shapeshift.registry import Layout
from shapeshift.registry_mirror.mirror import open_mirror
from shapeshift.registry_mirror.remote import is_url
from shapeshift.settings import require


def folder(stated: str, front: str, paths: BuildPaths) -> Path | None:
    """The folder of the copy for the front model `front`, which may be missing; None where `stated` is no URL."""
    return paths.build / "registries" / front if is_url(stated) else None


def update(field: str, stated: str, layout: Layout, front: str, paths: BuildPaths, starter_dir: str = "") -> None:
    """Make the copy equal to the registry where the parameter `field` states a URL.

    Raises InvalidInputError for an entry that cannot be taken over, or a `starter_dir`, OverloadedError for a URL that
    cannot be read.
    """
    if (target := folder(stated, front, paths)) is None:
        return
    require(not starter_dir, "starter_dir", starter_dir, f"left out: {field} is a URL, where nothing is written")
    if refused := open_mirror(field, stated, layout, target).update():
        raise InvalidInputError(field, stated, "; ".join(refused.values()))


def parameters(stated: str) -> dict[str, str]:
    """What the generated config.pbtxt says of the URL; nothing of a folder."""
    return {"registry_url": stated} if is_url(stated) else {}
