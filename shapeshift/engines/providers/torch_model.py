"""A torch graph with its weights on one device, and the engine that computes it eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from shapeshift.engines import cuda_device
from shapeshift.engines.interfaces import Array
from shapeshift.engines.providers import packed_attention  # noqa: F401  graphs have its operator
from shapeshift.engines.providers.torch_signature import PROGRAM, Signature

# The highest that a device has is taken for a lower number. It counts among the streams of a process, and between
# processes under NVIDIA's MPS.
_HIGH_PRIORITY = -1


@dataclass(frozen=True)
class Shared:
    """What the models of a process share on a GPU.

    stream   on which all of them run
    capture  on which their graphs are captured, also while others run
    pool     the memory of their graphs; they may share it, since one runs after the other
    """

    stream: Any
    capture: Any
    pool: Any


class TorchModel:
    """The exported graph in `folder`, with its weights on one device.

    threads  of the CPU
    device   the number of a GPU; None: the CPU
    beside   another model on that device: weights of the same name and content are in memory once, and `shared` is
             that of both
    """

    def __init__(self, folder: Path, threads: int, device: int | None, beside: TorchModel | None = None) -> None:
        self.device = torch.device("cpu" if device is None else f"cuda:{device}")
        self.signature = Signature.load(folder)
        self._threads = threads
        program = torch.export.load(folder / PROGRAM)
        if beside is not None:
            _share(program, beside.weights)
        self.shared: Shared | None = _shared(self.device) if beside is None else beside.shared
        if device is not None:
            with cuda_device.naming_memory(device, f"the weights in {folder}"):
                # Tensors that the graph makes itself, such as masks, name their device in it.
                program = move_to_device_pass(program, self.device)
        self.weights: Mapping[str, torch.Tensor] = program.state_dict
        self._module = program.module()

    def on_stream(self) -> AbstractContextManager[Any]:
        """What is computed inside runs on the model's stream; nothing changes on a CPU."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self.shared.stream if self.shared else None)
        return context

    def naming_memory(self, what: str) -> AbstractContextManager[None]:
        """See `cuda_device.naming_memory`; nothing on a CPU."""
        return nullcontext() if self.shared is None else cuda_device.naming_memory(self.device.index, what)

    def tensors(self, inputs: Mapping[str, Array]) -> list[torch.Tensor]:
        """The inputs of the graph, in its order, on the device."""
        return [torch.from_numpy(inputs[one.name]).to(self.device) for one in self.signature.inputs]

    def compute(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs, on the device."""
        with torch.inference_mode():
            outputs = self._module(*tensors)
        return dict(zip(self.signature.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))

    def set_threads(self) -> None:
        """Let the calling thread use the model's number of threads."""
        torch.set_num_threads(self._threads)


class TorchEngine:
    """The graph for any shape, or for one that is not captured. The first call fixes the number of its threads."""

    def __init__(self, model: TorchModel, tokens: int | None, rows: int | None) -> None:
        self.tokens = tokens
        self.rows = rows
        self.model = model
        self._is_first = True

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._is_first:
            # torch's setting is that of the calling thread, which for engines is not the one that loads them.
            self.model.set_threads()
            self._is_first = False
        shape = " x ".join(map(str, next(iter(inputs.values())).shape))
        with self.model.naming_memory(f"a call of {shape} {next(iter(inputs))}"), self.model.on_stream():
            outputs = self.model.compute(self.model.tensors(inputs))
            return {name: value.cpu().numpy() for name, value in outputs.items()}


def _shared(device: torch.device) -> Shared | None:
    if device.type != "cuda":
        return None
    stream, capture = (torch.cuda.Stream(device, priority=_HIGH_PRIORITY) for _ in range(2))
    return Shared(stream, capture, torch.cuda.graph_pool_handle())


def _share(program: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Let `program` have those of `weights` that are equal to its own."""
    for name, weight in program.state_dict.items():
        other = weights.get(name)
        if other is None or (weight.shape, weight.dtype) != (other.shape, other.dtype):
            continue
        if torch.equal(weight.to(other.device), other):
            program.state_dict[name] = other
