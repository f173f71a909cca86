"""A torch graph with its weights on one device, and the engine that computes it eagerly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.export.passes import move_to_device_pass

from shapeshift.engines.interfaces import Array


class TorchModel:
    """The exported graph in `program_file`, with its weights on one device.

    inputs, outputs  names, in the order of the graph
    threads          of the CPU
    device           the number of a GPU; None: the CPU
    """

    def __init__(
        self, program_file: Path, inputs: Sequence[str], outputs: Sequence[str], threads: int, device: int | None
    ) -> None:
        self.device = torch.device("cpu" if device is None else f"cuda:{device}")
        self.inputs, self.outputs = inputs, outputs
        self._threads = threads
        program = torch.export.load(program_file)
        if device is not None:
            # Tensors that the graph makes itself, such as masks, name their device in it.
            program = move_to_device_pass(program, self.device)
        self._module = program.module()

    def tensors(self, inputs: Mapping[str, Array]) -> list[torch.Tensor]:
        """The inputs of the graph, in its order, on the device."""
        return [torch.from_numpy(inputs[name]).to(self.device) for name in self.inputs]

    def compute(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs, on the device."""
        with torch.inference_mode():
            found = self._module(*tensors)
        return dict(zip(self.outputs, found if isinstance(found, tuple) else (found,), strict=True))

    def set_threads(self) -> None:
        """Let the calling thread use the model's number of threads."""
        torch.set_num_threads(self._threads)


class TorchEngine:
    """The graph for any shape, or for one that is not captured. The first call fixes the number of its threads."""

    def __init__(self, model: TorchModel, tokens: int | None, rows: int | None) -> None:
        self.tokens = tokens
        self.rows = rows
        self._model = model
        self._is_first = True

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._is_first:
            # torch's setting is that of the calling thread, which for engines is not the one that loads them.
            self._model.set_threads()
            self._is_first = False
        outputs = self._model.compute(self._model.tensors(inputs))
        return {name: value.cpu().numpy() for name, value in outputs.items()}
