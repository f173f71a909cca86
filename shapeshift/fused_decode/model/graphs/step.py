"""One step within bounds, captured as a CUDA graph; on a CPU it is computed each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shapeshift.engines import cuda_device
from shapeshift.fused_decode.interfaces import GraphHook, StepBatch
from shapeshift.fused_decode.model.graphs.bounds import GraphBounds
from shapeshift.fused_decode.model.graphs.inputs import StepInputs, elements
from shapeshift.fused_decode.model.network import Network
from shapeshift.fused_decode.model.torch_operations import StepKernels, TorchOperations

_WARM_UPS = 3


class GraphStep:
    """The steps within `bounds`."""

    def __init__(
        self,
        bounds: GraphBounds,
        network: Network,
        latest: torch.Tensor,
        pool: Any,
        first: StepBatch,
        kernels: StepKernels,
        hook: GraphHook | None = None,
    ) -> None:
        """latest: INT64 [slots], see `StepInputs.tokens`; pool: the memory that all graphs of a model share, None on a
        CPU; first: with which the capture computes; hook: of the terms of `bounds.linears`."""
        self.hook = hook
        device = network.embedding.device
        on_gpu = device.type == "cuda"
        host = torch.zeros(elements(bounds), dtype=torch.int64, pin_memory=on_gpu)
        self._host = StepInputs.over(bounds, host)
        self._host.fill(first)
        self._inputs = StepInputs.over(bounds, host.to(device, copy=True))
        self._terms = hook.fixed_terms(bounds.rows, bounds.chunk, bounds.linears) if hook is not None else None
        if self._terms is not None:
            self._terms.fill(first)
        delta = None if self._terms is None else self._terms.delta
        # Kept as long as the graph: a replay reads what lay outside of its pool at the addresses of the capture.
        self._last = self._inputs.last()
        inputs, last, operations = self._inputs, self._last, TorchOperations(device, kernels)
        self._logits = torch.empty(len(last), network.architecture.vocab_size, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

        def compute() -> None:
            tokens, positions = inputs.tokens(latest), inputs.positions()
            self._logits.copy_(network.forward(operations, tokens, positions, inputs.plan(), last, delta))

        self._compute = _capture(compute, device, pool, bounds) if on_gpu else compute

    def run(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the step `batch`, without a wait for the device.

        Returns the logits FLOAT32 [wanted rows, vocab_size], and the slots of these rows, INT64, valid until the next
        call.
        """
        if self._copied is not None:
            # The last step of these bounds may not have begun. The one before the last has ended, so this is short.
            self._copied.synchronize()
        self._host.fill(batch)
        self._inputs.flat.copy_(self._host.flat, non_blocking=True)
        if self._terms is not None:
            self._terms.fill(batch)
        if self._copied is not None:
            self._copied.record()
        self._compute()
        places, slots = self._inputs.chosen[:, : len(batch.logit_rows)]
        return self._logits[places], slots


def new_pool() -> Any:
    """Memory for the graphs of one model. They may share it, since one is replayed after the other."""
    return torch.cuda.graph_pool_handle()


def _capture(compute: Callable[[], None], device: torch.device, pool: Any, bounds: GraphBounds) -> Callable[[], None]:
    """A function that replays `compute` as a CUDA graph, captured after a few warm-up runs."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    what = f"the graph of {bounds.rows} rows, {bounds.context} places and a chunk of {bounds.chunk} tokens"
    with cuda_device.naming_memory(device.index, what, "lower kv_cache_tokens or max_concurrency"):
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream(device).wait_stream(side)
        # On the model's device, whichever is the thread's. Other threads allocate meanwhile: those that load adapters.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            compute()
    return graph.replay
