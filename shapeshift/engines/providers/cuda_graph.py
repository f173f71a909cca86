"""One static length of a torch model as a CUDA graph: captured once, replayed for each call.

Follows the documented API of torch; we have not run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shapeshift.engines.interfaces import INPUT_AXES, Array
from shapeshift.engines.providers.torch_model import TorchModel
from shapeshift.errors import EngineError

_WARM_UPS = 3
_SIZE = {"tokens": 0, "rows": 1}


def new_pool() -> Any:
    """Memory that the graphs of a process share. It is safe because their engines run one at a time."""
    return torch.cuda.graph_pool_handle()


class CudaGraphEngine:
    """A graph of `tokens` and `rows` with its own inputs and outputs. The arrays are valid until the next call."""

    def __init__(self, model: TorchModel, pool: Any, tokens: int, rows: int) -> None:
        self.tokens: int | None = tokens
        self.rows: int | None = rows
        self._model = model
        sizes = (tokens, rows)
        shapes = {
            name: [sizes[_SIZE[axes[axis]]] if axis in axes else 1 for axis in range(max(axes) + 1)]
            for name, axes in INPUT_AXES.items()
        }
        # Page-locked memory, so that copies do not wait for the device.
        self._host = {name: torch.ones(shapes[name], dtype=torch.int64).pin_memory() for name in model.inputs}
        self._inputs = [value.to(model.device) for value in self._host.values()]
        self._stream = torch.cuda.Stream(model.device)
        self._graph = torch.cuda.CUDAGraph()
        try:
            self._outputs = self._capture(pool)
        except torch.cuda.OutOfMemoryError as error:
            free, total = (size >> 20 for size in torch.cuda.mem_get_info(model.device))
            raise EngineError(
                f"GPU {model.device.index}: no memory for the graph of {tokens} tokens, {free} of {total} MiB are"
                f" free ({str(error).partition('.')[0]}); lower memory_mb or max_bins, or set KIND_CPU"
            ) from None
        self._results = {
            name: torch.empty_like(value, device="cpu").pin_memory() for name, value in self._outputs.items()
        }

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for name, value in self._host.items():
            value.copy_(torch.from_numpy(inputs[name]))
        with torch.cuda.stream(self._stream):
            for device, host in zip(self._inputs, self._host.values(), strict=True):
                device.copy_(host, non_blocking=True)
            self._graph.replay()
            for name, result in self._results.items():
                result.copy_(self._outputs[name], non_blocking=True)
        self._stream.synchronize()
        return {name: value.numpy() for name, value in self._results.items()}

    def _capture(self, pool: Any) -> dict[str, torch.Tensor]:
        with torch.cuda.stream(self._stream):
            # Libraries choose their kernels, and allocate, in the first calls.
            for _ in range(_WARM_UPS):
                self._model.compute(self._inputs)
        self._stream.synchronize()
        # Other threads of the process may allocate meanwhile: they compute with engines that are loaded already.
        with torch.cuda.graph(self._graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            return self._model.compute(self._inputs)
