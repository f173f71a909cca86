"""torch: an exported graph, computed eagerly; on a GPU the graph of each static length is captured as a CUDA graph.

It needs no other package. The weights lie in memory once for all engines of a process. The CUDA path follows the
documented API; we have not run it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.engines import cuda_device
from shapeshift.engines.interfaces import MAX_TOKENS, Array, Engine
from shapeshift.errors import UnsupportedError

_MODEL_FILE = "model.pt2"
_NAMES_FILE = "names.txt"


class TorchRuntime:
    """The engines of one graph. Those of a GPU share its weights, and the memory of their captured graphs."""

    def __init__(self, folder: Path, threads: int, device: int | None) -> None:
        # torch takes seconds to import: not for a look at the providers.
        from shapeshift.engines.providers import torch_model

        inputs, outputs = (line.split() for line in (folder / _NAMES_FILE).read_text().splitlines())
        self._model = torch_model.TorchModel(folder / _MODEL_FILE, inputs, outputs, threads, device)
        self._pool: Any = None

    def engine(self, tokens: int | None, rows: int | None) -> Engine:
        from shapeshift.engines.providers import cuda_graph, torch_model

        if tokens is None or rows is None or self._model.device.type != "cuda":
            return torch_model.TorchEngine(self._model, tokens, rows)
        self._pool = self._pool or cuda_graph.new_pool()
        return cuda_graph.CudaGraphEngine(self._model, self._pool, tokens, rows)


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
        with torch.no_grad():
            program = torch.export.export(module, arguments, dynamic_shapes=axes, strict=False)
        torch.export.save(program, folder / _MODEL_FILE)
        lines = (module.input_axes, module.output_names)
        (folder / _NAMES_FILE).write_text("".join(" ".join(names) + "\n" for names in lines))
        return [_MODEL_FILE, _NAMES_FILE]

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        return _MODEL_FILE

    def open(self, folder: Path, precision: str, threads: int, device: int | None = None) -> TorchRuntime:
        if device is not None:
            cuda_device.require_usable(device)
        return TorchRuntime(folder, threads, device)


PROVIDER = TorchProvider()


def _cast(module: Any, precision: str) -> Any:
    import torch

    if not hasattr(module, "cast"):
        raise UnsupportedError(f"precision: provider torch builds this model in f32, not {precision}")
    return copy.deepcopy(module).cast({"bf16": torch.bfloat16, "f16": torch.float16}[precision])
