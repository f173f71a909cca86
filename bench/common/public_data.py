"""Public data sets and traces: the whole in the folder that SHAPESHIFT_DATA names, or the samples of this project."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from shapeshift.errors import NotFoundError

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
VARIABLE = "SHAPESHIFT_DATA"


def folder() -> Path:
    """The folder of data: that of SHAPESHIFT_DATA, or of the samples."""
    return Path(os.environ.get(VARIABLE) or SAMPLES)


def described() -> str:
    """The data of a run, for the head of its results."""
    return "samples" if folder() == SAMPLES else str(folder())


def data_file(name: str) -> Path:
    """The file `name` of the data; says once on standard error if it is a sample.

    Raises NotFoundError naming the file, the variable, and where the data are found.
    """
    file = folder() / name
    if not file.is_file():
        raise NotFoundError(
            f"no {file}: set {VARIABLE} to a folder that holds {name}; {SAMPLES / 'README.md'} says where"
        )
    if folder() == SAMPLES:
        _say_sample(name)
    return file


@cache
def _say_sample(name: str) -> None:
    sys.stderr.write(f"data: the sample of {name} in {SAMPLES}; set {VARIABLE} to a folder with the whole\n")
