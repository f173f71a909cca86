"""ONNX Runtime with its TensorRT execution provider: TensorRT's kernels, and CUDA's for what it does not have.

The types of the ONNX file are the precision: without its options for f16 and bf16 the execution provider obeys them.
It builds a TensorRT engine when a session opens, and keeps it beside the ONNX file: `make engines` pays for that, not a
process that serves. Follows the documented options of ONNX Runtime; we have not run it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.engines import gpu
from shapeshift.engines.gpu import CPU_INSTEAD
from shapeshift.engines.interfaces import MAX_TOKENS, Array, Runtime
from shapeshift.engines.providers.onnx_export import MODEL_FILE, export_onnx
from shapeshift.engines.providers.onnxruntime import CUDA, CudaGraphEngine, OnnxRuntimeEngine, gpu_engine
from shapeshift.engines.providers.onnxruntime import PROVIDER as PLAIN
from shapeshift.engines.providers.tensorrt import MOST, USUAL
from shapeshift.errors import UnsupportedError

_NAME = "TensorrtExecutionProvider"
PROFILE_FILE = "tensorrt_profile.json"
"""The least and the largest shapes of the engine of any shape, as options of the execution provider."""
TIMINGS = Path.home() / ".cache" / "shapeshift" / "onnxruntime_tensorrt"
"""The folder that keeps how fast kernels were, so that a second build is quicker."""


class OnnxRuntimeTensorRtRuntime:
    """The sessions of one ONNX file on one GPU."""

    def __init__(self, folder: Path, threads: int, device: int) -> None:
        import onnxruntime

        if _NAME not in onnxruntime.get_available_providers():
            raise UnsupportedError(
                f"GPU {device}: this onnxruntime {onnxruntime.__version__} has no TensorRT; install onnxruntime-gpu and"
                f" tensorrt, or choose another provider; {CPU_INSTEAD}"
            )
        gpu.describe(device)
        self._folder = folder
        self._threads = threads
        self._device = device
        self._caches: list[Path] = []

    def engine(self, tokens: int | None, rows: int | None) -> OnnxRuntimeEngine | CudaGraphEngine:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        trt_options = self._options(tokens)
        if tokens is not None and rows is not None:
            options.add_free_dimension_override_by_name("tokens", tokens)
            options.add_free_dimension_override_by_name("rows", rows)
            trt_options["trt_cuda_graph_enable"] = "1"
        else:
            trt_options |= json.loads((self._folder / PROFILE_FILE).read_text(encoding="utf-8"))
        providers = [(_NAME, trt_options), (CUDA, {"device_id": self._device})]
        return gpu_engine(str(self._folder / MODEL_FILE), options, providers, tokens, rows, self._device)

    def used_mb(self) -> float:
        """The engines that were built or read, of which each has its own weights."""
        return sum(file.stat().st_size for folder in self._caches for file in folder.glob("*.engine")) / 2**20

    def _options(self, tokens: int | None) -> dict[str, str]:
        """Of the execution provider. Engines have the name of their graph: each length has a folder of its own."""
        cache = self._folder / "tensorrt" / ("dynamic" if tokens is None else str(tokens))
        for folder in (cache, TIMINGS):
            folder.mkdir(parents=True, exist_ok=True)
        self._caches.append(cache)
        return {
            "device_id": str(self._device),
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(cache),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(TIMINGS),
        }


class OnnxRuntimeTensorRtProvider:
    """See `interfaces.Provider`."""

    name = "onnxruntime_tensorrt"

    def version(self) -> str:
        return PLAIN.version()

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        return [export_onnx(module, example, folder, precision)]

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        if tokens is None:
            least = _shapes(folder, dict.fromkeys((*MOST, "tokens"), 1))
            most = _shapes(folder, {**MOST, "tokens": max_tokens})
            usual = _shapes(folder, {**USUAL, "tokens": min(USUAL["tokens"], max_tokens)})
            shapes = {"trt_profile_min_shapes": least, "trt_profile_opt_shapes": usual, "trt_profile_max_shapes": most}
            (folder / PROFILE_FILE).write_text(json.dumps(shapes), encoding="utf-8")
        return MODEL_FILE

    def open(
        self, folder: Path, precision: str, threads: int, device: int | None = None, beside: Runtime | None = None
    ) -> OnnxRuntimeTensorRtRuntime:
        return OnnxRuntimeTensorRtRuntime(folder, threads, device or 0)


PROVIDER = OnnxRuntimeTensorRtProvider()


def _shapes(folder: Path, sizes: Mapping[str, int]) -> str:
    """The shapes of all inputs, with these sizes of their variable axes, in the form of the options."""
    import onnx

    graph = onnx.load(str(folder / MODEL_FILE), load_external_data=False).graph
    shapes = {
        one.name: "x".join(str(axis.dim_value or sizes[axis.dim_param]) for axis in one.type.tensor_type.shape.dim)
        for one in graph.input
    }
    return ",".join(f"{name}:{shape}" for name, shape in shapes.items())
