"""A torch model for fixed sizes as a CUDA graph: captured once, replayed for each call.

Ran on an H200. On a CPU the captured code is computed at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shapeshift.engines import cuda_device
from shapeshift.engines.interfaces import Array
from shapeshift.engines.providers.torch_model import Shared, TorchEngine, TorchModel

_WARM_UPS = 3
# The axes whose inputs are others in each call.
_OF_A_CALL = {"tokens", "rows", "images"}

Outputs = dict[str, torch.Tensor]


class CudaGraphEngine:
    """A graph with its own inputs and outputs. The arrays are valid until the next call.

    sizes: of the axes that vary. The inputs of a call may be smaller: what is left of each is as it was, and what the
    outputs have for it means nothing.
    """

    def __init__(self, model: TorchModel, sizes: Mapping[str, int]) -> None:
        self.sizes, self.tokens, self.rows = sizes, sizes.get("tokens"), sizes.get("rows")
        self._model = model
        on_gpu = model.device.type == "cuda"
        # Page-locked memory, so that copies do not wait for the device.
        self._host = {
            one.name: torch.ones(one.shape_of(sizes), dtype=getattr(torch, one.kind), pin_memory=on_gpu)
            for one in model.signature.inputs
        }
        self._inputs = {name: value.to(model.device, copy=True) for name, value in self._host.items()}
        self._lasting = {one.name for one in model.signature.inputs if not _OF_A_CALL & set(one.axes.values())}
        self._last: dict[str, Array] = {}
        named = ", ".join(f"{size} {axis}" for axis, size in sizes.items())
        self._compute = self._eager if model.shared is None else self._captured(model.shared, named)
        self._results: Outputs = {}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with self._model.on_stream():
            for name, host in self._host.items():
                array = inputs[name]
                # The same array again: what a model keeps between calls, such as the prompts of its tasks.
                if name in self._lasting and self._last.get(name) is array:
                    continue
                self._last[name] = array
                host[tuple(slice(size) for size in array.shape)] = torch.from_numpy(array)
                self._inputs[name].copy_(host, non_blocking=True)
            outputs = self._compute()
            if not self._results:
                on_gpu = self._model.device.type == "cuda"
                self._results = {
                    name: torch.empty_like(value, device="cpu", pin_memory=on_gpu) for name, value in outputs.items()
                }
            for name, result in self._results.items():
                result.copy_(outputs[name], non_blocking=True)
        if self._model.shared is not None:
            self._model.shared.stream.synchronize()
        return {name: value.numpy() for name, value in self._results.items()}

    def _eager(self) -> Outputs:
        return self._model.compute(list(self._inputs.values()))

    def _captured(self, shared: Shared, named: str) -> Callable[[], Outputs]:
        """Capture the computation; what is given replays it."""
        graph = torch.cuda.CUDAGraph()
        with cuda_device.naming_memory(self._model.device.index, f"the graph of {named}"):
            with torch.cuda.stream(shared.capture):
                # Libraries choose their kernels, and allocate, in the first calls.
                for _ in range(_WARM_UPS):
                    self._eager()
            shared.capture.synchronize()
            # Other threads of the process may allocate meanwhile: they compute with engines that are loaded already.
            with torch.cuda.graph(graph, pool=shared.pool, stream=shared.capture, capture_error_mode="thread_local"):
                outputs = self._eager()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


class SizedGraphs:
    """Graphs for a few sizes of each axis that varies. A call takes the smallest that holds it; a larger one is eager.

    Those of the first axis are captured at once, with the least size of the others, whose further sizes come when a
    call has them. captured: ascending sizes of each axis, the first one that of the outputs' rows.
    """

    tokens: int | None = None
    rows: int | None = None

    def __init__(self, model: TorchModel, captured: Mapping[str, Sequence[int]]) -> None:
        self._model = model
        axes = {axis for one in model.signature.inputs for axis in one.axes.values()}
        self._captured = {axis: choices for axis, choices in captured.items() if axis in axes}
        self._eager = TorchEngine(model, None, None)
        self._graphs: dict[tuple[int, ...], CudaGraphEngine] = {}
        self._counted, *others = self._captured
        least = {axis: self._captured[axis][0] for axis in others}
        # The largest first: the others find their memory in its.
        for size in reversed(self._captured[self._counted]):
            self._graph({self._counted: size, **least})

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        call = self._model.signature.sizes(inputs)
        sizes = {
            axis: next((size for size in ascending if size >= call[axis]), None)
            for axis, ascending in self._captured.items()
        }
        fitting = {axis: size for axis, size in sizes.items() if size is not None}
        if len(fitting) < len(sizes):
            return self._eager.run(inputs)
        outputs = self._graph(fitting).run(inputs)
        return {name: values[: call[self._counted]] for name, values in outputs.items()}

    @property
    def graphs(self) -> list[CudaGraphEngine]:
        """Those that there are, in the order in which they were captured."""
        return list(self._graphs.values())

    def _graph(self, sizes: Mapping[str, int]) -> CudaGraphEngine:
        key = tuple(sizes.values())
        if key not in self._graphs:
            self._graphs[key] = CudaGraphEngine(self._model, sizes)
        return self._graphs[key]
