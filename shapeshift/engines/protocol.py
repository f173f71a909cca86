"""What every provider of compiled engines offers, and the tensors that pass between it and its callers.

A text engine takes a *pack*: one sequence of tokens in which one or several texts ("rows") lie side by
side. Attention is confined to a row by its segment number, so that a pack computes what its rows would
alone, without padding between them.

    INPUT_IDS  INT64 [1, tokens]   vocabulary ids, 0 where unused
    SEGMENTS   INT64 [1, tokens]   1, 2, ... for the rows, 0 where unused
    POSITIONS  INT64 [1, tokens]   position inside the row (plus the family's offset)
    ROWS       INT64 [rows]        the segment numbers to pool, 1..rows

Outputs have one entry a row, [rows, ...]; rows that no segment belongs to hold values without meaning. Those of
`TOKEN_OUTPUTS` have one value a token of the pack, [1, tokens].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]

TOKEN_OUTPUTS = ("IMPORTANCE",)
INPUT_NAMES = ("INPUT_IDS", "SEGMENTS", "POSITIONS", "ROWS")


class Engine(Protocol):
    """One compiled graph. Not thread-safe: each thread opens its own."""

    tokens: int | None
    rows: int | None

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Compute one pack of exactly this engine's shape; the arrays are valid until the next call."""
        ...


class Runtime(Protocol):
    """One built model, opened by one thread of one process."""

    def engine(self, tokens: int | None, rows: int | None) -> Engine:
        """Compile or load the engine of that shape (None, None: any shape). May take seconds."""
        ...


class Provider(Protocol):
    """A module that compiles and opens engines with one library."""

    name: str

    def version(self) -> str:
        """The library's version; raises UnsupportedError where it is not installed."""
        ...

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        """Write what later engines are made from into `folder` and return the names of the files.

        `module` is a torch module whose forward takes the inputs of `INPUT_NAMES` in that order and
        returns the outputs; `example` is a pack of two rows.
        """
        ...

    def compile(self, folder: Path, precision: str, tokens: int | None, rows: int | None) -> str:
        """Make the engine of one shape ready in `folder`; the name of the file it loads from."""
        ...

    def open(self, folder: Path, precision: str, threads: int) -> Runtime:
        """A runtime over a folder that `export` and `compile` filled."""
        ...
