"""One step within bounds, captured as a CUDA graph; on a CPU it is computed each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shapeshift.errors import EngineError
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model.graphs.bounds import GraphBounds
from shapeshift.fused_decode.model.graphs.inputs import StepInputs, elements
from shapeshift.fused_decode.model.graphs.operations import GraphOperations
from shapeshift.fused_decode.model.network import Network

_WARM_UPS = 3


class GraphStep:
    """The steps within `bounds`.

    logits: FLOAT32 [rows, vocab_size], then one row for the chunk, if there is one; valid until the next `run`.
    """

    def __init__(self, bounds: GraphBounds, network: Network, pool: Any, first: StepBatch) -> None:
        """pool: the memory that all graphs of a model share, None on a CPU; first: with which the capture computes."""
        device = network.embedding.device
        on_gpu = device.type == "cuda"
        host = torch.zeros(elements(bounds), dtype=torch.int64, pin_memory=on_gpu)
        self._host = StepInputs.over(bounds, host)
        self._host.fill(first)
        self._inputs = StepInputs.over(bounds, host.to(device, copy=True))
        inputs, last, operations = self._inputs, self._inputs.last(), GraphOperations(device)
        self.logits = torch.empty(len(last), network.architecture.vocab_size, device=device)

        def compute() -> None:
            tokens, positions = inputs.tokens(), inputs.positions()
            self.logits.copy_(network.forward(operations, tokens, positions, inputs.plan(), last))

        self._compute = _capture(compute, device, pool, bounds) if on_gpu else compute

    def run(self, batch: StepBatch) -> None:
        """Compute `logits` of the step `batch`, without a wait for the device."""
        self._host.fill(batch)
        self._inputs.flat.copy_(self._host.flat, non_blocking=True)
        self._compute()


def new_pool() -> Any:
    """Memory for the graphs of one model. They may share it, since one is replayed after the other."""
    return torch.cuda.graph_pool_handle()


def _capture(compute: Callable[[], None], device: torch.device, pool: Any, bounds: GraphBounds) -> Callable[[], None]:
    """A function that replays `compute` as a CUDA graph, captured after a few warm-up runs."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream(device).wait_stream(side)
        # On the model's device, whichever is the thread's. Other threads allocate meanwhile: those that load adapters.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            compute()
    except torch.cuda.OutOfMemoryError as error:
        free, total = (size >> 20 for size in torch.cuda.mem_get_info(device))
        raise EngineError(
            f"GPU {device.index}: no memory for the graph of {bounds.rows} rows, {bounds.context} places and a chunk"
            f" of {bounds.chunk} tokens; {free} of {total} MiB are free ({str(error).partition('.')[0]}); lower"
            " kv_cache_tokens or max_concurrency"
        ) from None
    return graph.replay
