"""One front's folder in the generated repository."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.triton import modelconfig

CONFIG = "config.pbtxt"
HOW_TO_CALL = "how_to_call.txt"


def write_front(source: Path, config: Any, target: Path, stated: Mapping[str, str], about: str) -> Any:
    """Make `target` anew: the configuration with `stated` parameters, and how to call it below the line `about`.

    Returns that configuration, which bears the folder's name.
    """
    shutil.rmtree(target, ignore_errors=True)
    (target / "1").mkdir(parents=True)
    made = type(config)()
    made.CopyFrom(config)
    made.name = target.name
    for name, value in stated.items():
        modelconfig.set_parameter(made, name, value)
    if (source / HOW_TO_CALL).is_file():
        example = (source / HOW_TO_CALL).read_text(encoding="utf-8")
        (target / HOW_TO_CALL).write_text(f"{about}\n{example}", encoding="utf-8")
    modelconfig.write(made, target / CONFIG)
    return made
