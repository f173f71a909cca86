"""The inputs and outputs of a torch graph: a file beside it, written when it is exported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shapeshift.engines.interfaces import Array

PROGRAM, FILE = "model.pt2", "signature.json"


@dataclass(frozen=True)
class Input:
    """name; axes: name of each axis that varies, by number as text; shape, kind: of the array it was exported with."""

    name: str
    axes: Mapping[str, str]
    shape: Sequence[int]
    kind: str

    def shape_of(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for these sizes of the axes that vary."""
        return tuple(
            sizes[self.axes[str(axis)]] if str(axis) in self.axes else size for axis, size in enumerate(self.shape)
        )


@dataclass(frozen=True)
class Signature:
    """inputs, outputs: in the order of the graph.

    captured: of the axes that vary, the sizes for which a GPU has a CUDA graph of the engine of any shape; empty: none.
    """

    inputs: Sequence[Input]
    outputs: Sequence[str]
    captured: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, module: Any, example: Mapping[str, Array]) -> Signature:
        """Of a module that is exported with `example`; see `interfaces.Provider.export`."""
        inputs = [
            Input(name, {str(axis): size for axis, size in axes.items()}, example[name].shape, str(example[name].dtype))
            for name, axes in module.input_axes.items()
        ]
        return cls(inputs, list(module.output_names), getattr(module, "captured", {}))

    def save(self, folder: Path) -> None:
        """Write it into `folder`."""
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Signature:
        """Read it from `folder`."""
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return cls([Input(**one) for one in values["inputs"]], values["outputs"], values["captured"])

    def sizes(self, inputs: Mapping[str, Array]) -> dict[str, int]:
        """The size of each axis that varies, in a call with these inputs."""
        return {axis: inputs[one.name].shape[int(number)] for one in self.inputs for number, axis in one.axes.items()}
