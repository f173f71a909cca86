"""ONNX Runtime. On a GPU its CUDA provider replays static shapes as CUDA graphs.

The CUDA path ran on an H200.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shapeshift.engines import gpu
from shapeshift.engines.gpu import CPU_INSTEAD
from shapeshift.engines.hardware import resident_mb
from shapeshift.engines.interfaces import MAX_TOKENS, Array, Runtime
from shapeshift.engines.providers.onnx_export import MODEL_FILE, export_onnx
from shapeshift.errors import EngineError, UnsupportedError

CUDA = "CUDAExecutionProvider"
# ONNX Runtime has no type for a full GPU; what its arena and CUDA say.
_FULL = re.compile(r"Failed to allocate memory|out of memory", re.IGNORECASE)
_ASKED = re.compile(r"requested buffer of size (\d+)")


class OnnxRuntimeEngine:
    """A session that reads and writes host arrays. device: the number of its GPU; None: the CPU."""

    def __init__(self, session: Any, tokens: int | None, rows: int | None, device: int | None = None) -> None:
        self.tokens = tokens
        self.rows = rows
        self._session = session
        self._device = device
        self._inputs = [port.name for port in session.get_inputs()]
        self._outputs = [port.name for port in session.get_outputs()]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        feed = {name: inputs[name] for name in self._inputs}
        if self._device is None:
            values = self._session.run(self._outputs, feed)
        else:
            shape = " x ".join(map(str, feed[self._inputs[0]].shape))
            with naming_memory(self._device, f"a call of {shape} {self._inputs[0]}"):
                values = self._session.run(self._outputs, feed)
        return dict(zip(self._outputs, values, strict=True))


class CudaGraphEngine:
    """A session of static shape, captured in its first call and replayed as a CUDA graph.

    Inputs and outputs keep their places on the device, which the graph has in it. Text models have INT64 inputs and
    FP32 outputs.
    """

    def __init__(self, session: Any, tokens: int, rows: int, device: int) -> None:
        import numpy as np
        import onnxruntime

        self.tokens = tokens
        self.rows = rows
        self._session = session
        self._device = device
        self._binding = session.io_binding()
        sizes = {"tokens": tokens, "rows": rows}

        def value(port: Any, kind: Any) -> Any:
            shape = [sizes.get(size, size) for size in port.shape]
            # Segment numbers of 0 belong to no row.
            return onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(shape, kind), "cuda", device)

        self._inputs = {port.name: value(port, np.int64) for port in session.get_inputs()}
        self._outputs = {port.name: value(port, np.float32) for port in session.get_outputs()}
        for name, place in self._inputs.items():
            self._binding.bind_ortvalue_input(name, place)
        for name, place in self._outputs.items():
            self._binding.bind_ortvalue_output(name, place)
        session.run_with_iobinding(self._binding)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for name, value in self._inputs.items():
            value.update_inplace(inputs[name])
        with naming_memory(self._device, f"the engine of {self.tokens} tokens"):
            self._session.run_with_iobinding(self._binding)
        return {name: value.numpy() for name, value in self._outputs.items()}


def gpu_engine(
    file: str, options: Any, providers: list[Any], tokens: int | None, rows: int | None, device: int
) -> OnnxRuntimeEngine | CudaGraphEngine:
    """A session on the GPU `device`, a CUDA graph for a static shape. providers: the first of them must be taken.

    Raises EngineError where ONNX Runtime cannot load it, or where the memory of the GPU does not suffice.
    """
    import onnxruntime

    first, _ = providers[0]
    with naming_memory(device, f"the engine of {tokens or 'any number of'} tokens"):
        session = onnxruntime.InferenceSession(file, options, providers=providers)
        # Where a provider's libraries cannot be loaded, ONNX Runtime only logs that and takes another one, or the CPU.
        if first not in session.get_providers():
            raise EngineError(
                f"GPU {device}: ONNX Runtime cannot load {first}, see its log; the libraries must be of the versions"
                f" that onnxruntime {onnxruntime.__version__} names; {CPU_INSTEAD}"
            )
        if tokens is not None and rows is not None:
            return CudaGraphEngine(session, tokens, rows, device)
        return OnnxRuntimeEngine(session, tokens, rows, device)


@contextmanager
def naming_memory(device: int, what: str) -> Iterator[None]:
    """Turn what ONNX Runtime raises where a GPU is full into an EngineError that says what was wanted for `what`, and
    what is free where the driver tells."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        if not _FULL.search(str(error)):
            raise
        match = _ASKED.search(str(error))
        more = f"{int(match[1]) / 2**20:.0f} MiB more are" if match else "more is"
        raise gpu.no_memory(device, what, f"{more} wanted, {_free(device)}") from error


def _free(device: int) -> str:
    try:
        return f"{gpu.free_mb(device):.0f} MiB are free"
    except UnsupportedError:
        return "what is free is not known"


class OnnxRuntimeRuntime:
    """The sessions of one ONNX file."""

    def __init__(self, folder: Path, threads: int, device: int | None) -> None:
        import onnxruntime

        self._file = str(folder / MODEL_FILE)
        self._threads = threads
        self._device = device or 0
        self._cuda = device is not None
        if self._cuda and CUDA not in onnxruntime.get_available_providers():
            raise UnsupportedError(
                f"GPU {device}: this onnxruntime {onnxruntime.__version__} is for CPUs; install onnxruntime-gpu (`make"
                f" setup GPU=1`); {CPU_INSTEAD}"
            )
        if device is not None:
            gpu.describe(device)
            # The CUDA libraries that torch or NVIDIA's packages brought: the loader does not look there.
            onnxruntime.preload_dlls()
        self._sessions = 0

    def engine(self, tokens: int | None, rows: int | None) -> OnnxRuntimeEngine | CudaGraphEngine:
        import onnxruntime

        self._sessions += 1
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        if tokens is not None and rows is not None:
            options.add_free_dimension_override_by_name("tokens", tokens)
            options.add_free_dimension_override_by_name("rows", rows)
        if not self._cuda:
            session = onnxruntime.InferenceSession(self._file, options, providers=["CPUExecutionProvider"])
            return OnnxRuntimeEngine(session, tokens, rows)
        cuda_options: dict[str, Any] = {"device_id": self._device}
        if tokens is not None and rows is not None:
            cuda_options["enable_cuda_graph"] = "1"
        return gpu_engine(self._file, options, [(CUDA, cuda_options)], tokens, rows, self._device)

    def used_mb(self) -> float:
        """On a GPU the weights, of which each session has its own."""
        size = Path(self._file).stat().st_size / 2**20
        return self._sessions * size if self._cuda else resident_mb()


class OnnxRuntimeProvider:
    """See `interfaces.Provider`."""

    name = "onnxruntime"

    def version(self) -> str:
        try:
            import onnxruntime
        except ImportError:
            raise UnsupportedError("provider onnxruntime: not installed; run `pip install onnx onnxruntime`") from None
        return str(onnxruntime.__version__)

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        if precision != "f32":
            raise UnsupportedError(f"precision: onnxruntime engines are built in f32, not {precision}")
        return [export_onnx(module, example, folder)]

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        return MODEL_FILE

    def open(
        self, folder: Path, precision: str, threads: int, device: int | None = None, beside: Runtime | None = None
    ) -> OnnxRuntimeRuntime:
        return OnnxRuntimeRuntime(folder, threads, device)


PROVIDER = OnnxRuntimeProvider()
