"""The folder of public data sets and traces."""

from __future__ import annotations

import os
from pathlib import Path

from shapeshift.errors import NotFoundError


def data_file(name: str) -> Path:
    """A file of the folder that SHAPESHIFT_DATA names. Raises NotFoundError naming the file and the variable."""
    file = Path(os.environ.get("SHAPESHIFT_DATA", "../shared/data")) / name
    if not file.is_file():
        raise NotFoundError(f"no {file}: set SHAPESHIFT_DATA to the folder of public data that holds {name}")
    return file
