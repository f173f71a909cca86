"""torch: an exported graph, computed eagerly; on a GPU static lengths, and a few batch sizes, are CUDA graphs.

It needs no other package. The weights lie in memory once for all engines of a process. Texts in one call attend to
themselves by `packed_attention`. The CUDA path ran on an H200.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from shapeshift.engines import cuda_device, hardware
from shapeshift.engines.interfaces import MAX_TOKENS, Array, Engine, Runtime
from shapeshift.engines.providers.torch_signature import FILE, PROGRAM, Signature
from shapeshift.errors import UnsupportedError


class TorchRuntime:
    """The engines of one graph. Those of a GPU share its weights, and the memory of their captured graphs."""

    def __init__(self, folder: Path, threads: int, device: int | None, beside: Runtime | None = None) -> None:
        # torch takes seconds to import: not for a look at the providers.
        from shapeshift.engines.providers import torch_model

        other = beside.model if isinstance(beside, TorchRuntime) else None
        self._device = device
        self.model: torch_model.TorchModel = torch_model.TorchModel(folder, threads, device, other)

    def engine(self, tokens: int | None, rows: int | None) -> Engine:
        from shapeshift.engines.providers import torch_model

        if self._device is None:
            return torch_model.TorchEngine(self.model, tokens, rows)
        return self.as_on_gpu(tokens, rows)

    def as_on_gpu(self, tokens: int | None, rows: int | None) -> Engine:
        """The engine of that shape as a GPU has it; on a CPU the same code, without graphs."""
        from shapeshift.engines.providers import cuda_graph, torch_model

        if tokens is not None and rows is not None:
            return cuda_graph.CudaGraphEngine(self.model, {"tokens": tokens, "rows": rows})
        captured = self.model.signature.captured
        if captured:
            return cuda_graph.SizedGraphs(self.model, captured)
        return torch_model.TorchEngine(self.model, tokens, rows)

    def used_mb(self) -> float:
        return hardware.resident_mb() if self._device is None else cuda_device.used_mb(self._device)


class TorchProvider:
    """See `interfaces.Provider`."""

    name = "torch"

    def version(self) -> str:
        try:
            import torch
        except ImportError:
            raise UnsupportedError("provider torch: not installed; run `make setup`") from None
        return str(torch.__version__)

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        import torch

        if precision != "f32":
            # The caller's module shares its weights with the reference, which stays in f32.
            module = _cast(module, precision)
        arguments = tuple(torch.from_numpy(example[name]) for name in module.input_axes)
        # torch takes a size of 1 for a constant: a model that packs no rows has one row always.
        axes = tuple(
            {axis: torch.export.Dim.DYNAMIC for axis in axes if example[name].shape[axis] > 1}
            for name, axes in module.input_axes.items()
        )
        with torch.no_grad(), _packed_attention(module):
            program = torch.export.export(module, arguments, dynamic_shapes=axes, strict=False)
        torch.export.save(program, folder / PROGRAM)
        Signature.of(module, example).save(folder)
        return [PROGRAM, FILE]

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        return PROGRAM

    def open(
        self, folder: Path, precision: str, threads: int, device: int | None = None, beside: Runtime | None = None
    ) -> TorchRuntime:
        if device is not None:
            cuda_device.require_usable(device)
            if beside is None:
                cuda_device.require_free(device, (folder / PROGRAM).stat().st_size / 2**20, f"the weights in {folder}")
        return TorchRuntime(folder, threads, device, beside)


PROVIDER = TorchProvider()


def _packed_attention(module: Any) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = getattr(module, "with_packed_attention", nullcontext)()
    return context


def _cast(module: Any, precision: str) -> Any:
    import torch

    if not hasattr(module, "cast"):
        raise UnsupportedError(f"precision: provider torch builds this model in f32, not {precision}")
    return copy.deepcopy(module).cast({"bf16": torch.bfloat16, "f16": torch.float16}[precision])
