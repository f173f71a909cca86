"""The interface of engine providers, and the tensors of engines.

An engine is exported from a torch module that names its tensors and their variable axes. For image models see
`token_adapt.model.gamma_module`; for text models they are as follows.

A text engine computes a *pack*: one sequence of tokens that holds one or several texts ("rows") side by side. Segment
numbers confine attention to a row, so a pack gives the same results as separate rows, without padding between them.

    INPUT_IDS  INT64 [1, tokens]   vocabulary ids, 0 where unused
    SEGMENTS   INT64 [1, tokens]   1, 2, ... for the rows, 0 where unused
    POSITIONS  INT64 [1, tokens]   position inside the row (plus the family's offset)
    ROWS       INT64 [rows]        the segment numbers to pool, 1..rows

Outputs have one entry per row, [rows, ...]; entries of rows without tokens are undefined. Outputs in `TOKEN_OUTPUTS`
have one entry per token of the pack, [1, tokens, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shapeshift.settings import Choices

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]

INPUT_AXES = {"INPUT_IDS": {1: "tokens"}, "SEGMENTS": {1: "tokens"}, "POSITIONS": {1: "tokens"}, "ROWS": {0: "rows"}}
# Of a text, unless config.pbtxt says otherwise.
MAX_TOKENS = 512
OUTPUT_AXES: Mapping[str, tuple[str, ...]] = {
    "EMBEDDING": ("width",),
    "LOGITS": ("labels",),
    "TOKEN_LOGITS": ("tokens", "labels"),
    "IMPORTANCE": ("tokens",),
    "TOKEN_EMBEDDING": ("tokens", "token_width"),
    "TOKEN_WEIGHTS": ("tokens",),
    "TERM_WEIGHTS": ("vocabulary",),
}
"""What text engines compute, and the axes of each output behind that of the rows."""
TOKEN_OUTPUTS = tuple(name for name, axes in OUTPUT_AXES.items() if axes[0] == "tokens")


class Engine(Protocol):
    """One compiled graph, of `tokens` and `rows`; None: any number. Not thread-safe: each thread opens its own."""

    tokens: int | None
    rows: int | None

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Compute one pack of exactly this engine's shape. The arrays are valid until the next call."""
        ...


@dataclass(frozen=True)
class Adapted:
    """What adapters change in a pack.

    terms  low-rank terms of linears, as `kernels/added.h` takes them; none: there are none
    heads  of an output's head: which texts have it, INT64 [n] places in the pack, and its tensors in place of the
           model's, in their order
    """

    terms: Sequence[Any] = ()
    heads: Sequence[tuple[Ids, Sequence[Any]]] = ()


class AdaptableEngine(Engine, Protocol):
    """An engine whose texts may have adapters."""

    def run_adapted(self, inputs: Mapping[str, Array], adapted: Adapted) -> dict[str, Array]:
        """As `run`."""
        ...


@runtime_checkable
class ThreadedEngine(Engine, Protocol):
    """An engine that computes one pack on any number of cores, with the same bits."""

    def use(self, threads: int) -> None:
        """Compute on so many cores from the next call on, 1 or more. A call that runs gives up those beyond.

        Any thread may call it.
        """
        ...


class Runtime(Protocol):
    """One built model, opened by a process."""

    def engine(self, tokens: int | None, rows: int | None) -> Engine:
        """Compile or load the engine of that shape (None, None: any shape). May take seconds."""
        ...

    def used_mb(self) -> float:
        """MiB that count against `memory_mb`: of a GPU's memory what the engines take, on a CPU the process's."""
        ...


class Provider(Protocol):
    """A module that compiles and opens engines with one library."""

    name: str

    def version(self) -> str:
        """The library's version. Raises UnsupportedError if it is not installed."""
        ...

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        """Write the graph that engines are compiled from into `folder`, and return the names of the files.

        `module` is a torch module. Its `input_axes` map each input to its variable axes, in the order of forward's
        arguments (the same names in lower case). The first axis of each of its `output_names` is variable. `example`
        has an array for each input, for instance a pack of two rows. Submodules named in its `f32_modules`, if it has
        any, choose by comparing numbers: they are computed in f32 whatever the precision. Its `cast`, if it has one,
        lets it compute in a torch type below f32; provider torch needs it for that. Its `with_packed_attention`, if it
        has one, is a context in which it is exported for provider torch. Its `captured`, if it has one, names for the
        engine of any shape the sizes of variable axes that are worth a CUDA graph.
        """
        ...

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        """Compile the engine of one shape in `folder`, and return the name of the file that it loads from.

        max_tokens: of a text, for the engine of any shape.
        """
        ...

    def open(
        self, folder: Path, precision: str, threads: int, device: int | None = None, beside: Runtime | None = None
    ) -> Runtime:
        """The runtime of a folder written by `export` and `compile`.

        threads: of the CPU, for one engine; device: the number of the GPU, None for the CPU; a provider of one kind
        of device takes its own, by default number 0. beside: a runtime of this provider in the same process, with
        which equal weights may be shared. Raises UnsupportedError where there is no such device, EngineError where it
        has too little memory.
        """
        ...


PROVIDERS: Choices[Provider] = Choices(
    "provider",
    {
        "openvino": "shapeshift.engines.providers.openvino:PROVIDER",
        "native": "shapeshift.engines.providers.native:PROVIDER",
        "onnxruntime": "shapeshift.engines.providers.onnxruntime:PROVIDER",
        "torch": "shapeshift.engines.providers.torch:PROVIDER",
        "tensorrt": "shapeshift.engines.providers.tensorrt:PROVIDER",
        "emulated": "shapeshift.engines.providers.emulated:PROVIDER",
    },
)
"""By name. Each is imported at its first use."""
