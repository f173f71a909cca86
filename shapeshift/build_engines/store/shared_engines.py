"""Engines that machines share: one of a kind builds them, the others of that kind copy them from a folder that all see.

STORE/MODEL/KEY is a folder of engines. The key is that of the build: it stands for hardware, provider, precision,
settings and checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from shapeshift import files

UP_TO_DATE, BUILT = "up to date", "built"


def ensure(
    target: Path,
    shared: Path | None,
    is_current: Callable[[Path], bool],
    build: Callable[[], object],
    publish: Callable[[], None],
) -> str:
    """Make `target` the folder of current engines. Returns how, for people.

    shared: the folder of the same engines in the store, None without a store; is_current: whether a folder holds them,
    with the hashes of its manifest; build: makes `target`, and raises what a build raises; publish: writes the model's
    folder, which names the engines by their hash, before anything else is done. A store that is damaged, full or cannot
    be written is told, and changes nothing.
    """
    how, problems = UP_TO_DATE, []
    is_stored = shared is not None and shared.is_dir()
    if not is_current(target):
        if shared is not None and is_stored:
            problems.append(_copied(shared, target, is_current))
            if not problems[0]:
                publish()
                return f"copied from {shared}"
            is_stored = False
        build()
        how = BUILT
    publish()
    if shared is not None and not is_stored:
        problems.append(_stored(target, shared, is_current))
    reasons = "; ".join(filter(None, problems))
    return f"{how} ({reasons})" if reasons else how


def _copied(shared: Path, target: Path, is_current: Callable[[Path], bool]) -> str:
    """Copy the engines into place. Returns why it failed, or an empty string."""
    try:
        with files.replace_folder(target) as work:
            shutil.copytree(shared, work, dirs_exist_ok=True)
            if not is_current(work):
                raise OSError("its files are not those of its manifest")
    except (OSError, shutil.Error) as error:
        return f"{shared} was not used: {error}"
    return ""


def _stored(engines: Path, shared: Path, is_current: Callable[[Path], bool]) -> str:
    """Put the engines into the store, unless another machine was faster. Returns why it failed, or an empty string."""
    try:
        shared.parent.mkdir(parents=True, exist_ok=True)
        with files.draft_of(shared) as work:
            shutil.copytree(engines, work)
            files.flush_folder(work)
            if shared.is_dir() and not is_current(shared):
                shutil.rmtree(shared)
            work.rename(shared)
    except (OSError, shutil.Error) as error:
        return "" if shared.is_dir() and is_current(shared) else f"not stored in {shared}: {error}"
    return ""
