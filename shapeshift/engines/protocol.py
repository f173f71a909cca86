"""What every provider of compiled engines offers, and the tensors that pass between it and its callers.

An engine is exported from a torch module that names its own tensors and which of their axes vary; with an image
model these are pixels (see `token_adapt.gamma_module`), with a text model as follows.

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

INPUT_AXES = {"INPUT_IDS": {1: "tokens"}, "SEGMENTS": {1: "tokens"}, "POSITIONS": {1: "tokens"}, "ROWS": {0: "rows"}}
INPUT_NAMES = tuple(INPUT_AXES)
TOKEN_OUTPUTS = ("IMPORTANCE",)


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

        `module` is a torch module with `input_axes`, which names every input in the order of its forward's
        arguments (called the same in lower case) and the axes of each that vary, and with `output_names`, whose
        first axis varies. `example` has an array for each input: a pack of two rows, for instance.
        """
        ...

    def compile(self, folder: Path, precision: str, tokens: int | None, rows: int | None) -> str:
        """Make the engine of one shape ready in `folder`; the name of the file it loads from."""
        ...

    def open(self, folder: Path, precision: str, threads: int) -> Runtime:
        """A runtime over a folder that `export` and `compile` filled."""
        ...
