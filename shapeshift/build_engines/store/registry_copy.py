"""Registries that config.pbtxt names by a URL: the build reads, and the server keeps up to date, a copy of each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from shapeshift.build_engines.paths import BuildPaths
from shapeshift.errors import InvalidInputError, OverloadedError
from shapeshift.registry import Layout
from shapeshift.registry_mirror.mirror import Mirror, is_url
from shapeshift.settings import require

_warn = logging.getLogger(__name__).warning


def folder(setting: str, front: str, paths: BuildPaths) -> Path | None:
    """The folder of the copy for the front model `front`, which may be missing; None where `setting` is no URL."""
    return paths.build / "registries" / front if is_url(setting) else None


def update(
    field: str,
    setting: str,
    layout: Layout,
    front: str,
    paths: BuildPaths,
    starter_dir: str = "",
    warn: Callable[[str], None] = _warn,
) -> None:
    """Make the copy equal to the registry where the parameter `field` states a URL.

    While the URL cannot be read, a whole copy of it stays as it is, and `warn` is called. Raises InvalidInputError for
    an entry that cannot be taken over, or a `starter_dir`, OverloadedError for a URL that cannot be read without such
    a copy.
    """
    if (target := folder(setting, front, paths)) is None:
        return
    require(not starter_dir, "starter_dir", starter_dir, f"left out: {field} is a URL, where nothing is written")
    mirror = Mirror(field, setting, layout, target)
    try:
        refused = mirror.update()
    except OverloadedError as error:
        if (age_s := mirror.age_s()) is None:
            raise
        age = timedelta(seconds=round(age_s))
        warn(f"WARNING: {front}: {field}: {error}; going on with the copy in {target}, read {age} (h:mm:ss) ago")
        return
    if refused:
        raise InvalidInputError(field, setting, "; ".join(refused.values()))


def parameters(setting: str) -> dict[str, str]:
    """What the generated config.pbtxt says of the URL; nothing of a folder."""
    return {"registry_url": setting} if is_url(setting) else {}
