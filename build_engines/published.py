"""The models' folders in the generated repository."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.triton import modelconfig

CONFIG = "config.pbtxt"
HOW_TO_CALL = "how_to_call.txt"
VERSION = "1"


def write_front(
    source: Path,
    config: Any,
    target: Path,
    stated: Mapping[str, str],
    about: str,
    further: Mapping[str, str] | None = None,
) -> Any:
    """Make `target` anew: the configuration with `stated` parameters, how to call it below the line `about`, and the
    contents of `further` files by their names.

    Returns that configuration, which bears the folder's name.
    """
    made = type(config)()
    made.CopyFrom(config)
    made.name = target.name
    for name, value in stated.items():
        modelconfig.set_parameter(made, name, value)
    contents = {CONFIG: modelconfig.as_text(made), **(further or {})}
    if (source / HOW_TO_CALL).is_file():
        example = (source / HOW_TO_CALL).read_text(encoding="utf-8")
        contents[HOW_TO_CALL] = f"{about}\n{example}"
    write_folder(target, contents)
    return made


def write_folder(target: Path, contents: Mapping[str, str]) -> None:
    """Let the model's folder `target` hold these files and no others. One that does is left alone: it may be served."""
    if _contents(target) == contents:
        return
    shutil.rmtree(target, ignore_errors=True)
    (target / VERSION).mkdir(parents=True)
    for name, text in contents.items():
        (target / name).write_text(text, encoding="utf-8")


def _contents(folder: Path) -> dict[str, str] | None:
    """The files below `folder` by their names there; None where it is no model's."""
    if not (folder / VERSION).is_dir():
        return None
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace") for path in files}
