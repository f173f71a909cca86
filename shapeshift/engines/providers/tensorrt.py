"""TensorRT: one plan of fixed shape per length, and one with an optimisation profile for any shape.

Follows the documented API of TensorRT 10.13 to 11; a test holds the names against the bindings of both, but we have not
run it. `make engines` verifies every plan against the reference model on the machine that builds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.engines import cuda_device, gpu
from shapeshift.engines.interfaces import MAX_TOKENS, Array, Runtime
from shapeshift.engines.providers.onnx_export import MODEL_FILE, export_onnx
from shapeshift.errors import EngineError, UnsupportedError
from shapeshift.files import replace_private

_MIB = 2**20
TIMING_CACHE = Path.home() / ".cache" / "shapeshift" / "tensorrt.timing"
"""The file that keeps how fast the kernels of all plans were that this user has built."""
MOST = {"rows": 16, "images": 64, "tasks": 64}
"""The most of each variable axis other than tokens that the engine of any shape takes."""
USUAL = {"rows": 4, "images": 8, "tasks": 8, "tokens": 128}
"""The shape for which that engine is tuned. Longer packs and static shapes have engines of their own."""


def plan_name(tokens: int | None) -> str:
    """The name of the plan file of one static length, or of the dynamic engine."""
    return f"{'dynamic' if tokens is None else tokens}.plan"


class TensorRtEngine:
    """One execution context with its own CUDA stream."""

    def __init__(self, plan: Path, tokens: int | None, rows: int | None, device: int) -> None:
        import tensorrt
        import torch

        self.tokens = tokens
        self.rows = rows
        self._torch = torch
        self._device = torch.device("cuda", device)
        # The plan is loaded on the thread's current device.
        torch.cuda.set_device(self._device)
        self._runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        if self._engine is None:
            raise EngineError(
                f"{plan} was built for another GPU or TensorRT version (here {tensorrt.__version__}); "
                "run `shapeshift engines` on this machine"
            )
        self._context = self._engine.create_execution_context()
        if self._context is None:
            size = self._engine.device_memory_size_v2 / _MIB
            figures = f"{size:.0f} MiB are wanted, {gpu.free_mb(device):.0f} MiB are free"
            raise gpu.no_memory(device, f"what {plan.name} computes in", figures)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        input_mode = tensorrt.TensorIOMode.INPUT
        self._inputs = [name for name in names if self._engine.get_tensor_mode(name) == input_mode]
        self._outputs = [name for name in names if self._engine.get_tensor_mode(name) != input_mode]
        self.used_mb = (plan.stat().st_size + self._engine.device_memory_size_v2) / _MIB

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        torch = self._torch
        with torch.cuda.stream(self._stream):
            values = {name: torch.from_numpy(inputs[name]).to(self._device, non_blocking=True) for name in self._inputs}
            for name, tensor in values.items():
                self._context.set_input_shape(name, tuple(tensor.shape))
                self._context.set_tensor_address(name, tensor.data_ptr())
            results = {
                name: torch.empty(tuple(self._context.get_tensor_shape(name)), device=self._device)  # f32, as exported
                for name in self._outputs
            }
            for name, tensor in results.items():
                self._context.set_tensor_address(name, tensor.data_ptr())
            if not self._context.execute_async_v3(self._stream.cuda_stream):
                raise EngineError("TensorRT reported a failed execution; see its log")
            host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in results.items()}
        self._stream.synchronize()
        return {name: tensor.numpy() for name, tensor in host.items()}


class TensorRtRuntime:
    """The plans of one folder."""

    def __init__(self, folder: Path, device: int) -> None:
        self._folder = folder
        self._device = device
        self._used_mb = 0.0

    def engine(self, tokens: int | None, rows: int | None) -> TensorRtEngine:
        plan = self._folder / plan_name(tokens)
        cuda_device.require_free(self._device, plan.stat().st_size / _MIB, f"the plan {plan}")
        engine = TensorRtEngine(plan, tokens, rows, self._device)
        self._used_mb += engine.used_mb
        return engine

    def used_mb(self) -> float:
        """Weights, and what the contexts compute in; not TensorRT's own code on the device."""
        return self._used_mb


class TensorRtProvider:
    """See `interfaces.Provider`."""

    name = "tensorrt"

    def version(self) -> str:
        try:
            import tensorrt
        except ImportError:
            raise UnsupportedError(
                "provider tensorrt: not installed; use NVIDIA's container, or openvino or onnxruntime"
            ) from None
        return str(tensorrt.__version__)

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        return [export_onnx(module, example, folder, precision)]

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        import tensorrt

        builder = tensorrt.Builder(tensorrt.Logger(tensorrt.Logger.WARNING))
        # The types of the graph are the precision, as everywhere in TensorRT 11, where the flag says nothing more.
        strongly_typed = tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
        network = builder.create_network(1 << int(strongly_typed))
        parser = tensorrt.OnnxParser(network, tensorrt.Logger(tensorrt.Logger.WARNING))
        if not parser.parse_from_file(str(folder / MODEL_FILE)):
            reasons = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
            raise EngineError(f"TensorRT cannot read {MODEL_FILE}: {reasons}")
        config = builder.create_builder_config()
        # f32 is f32: TensorRT would multiply it in 19 bits.
        config.clear_flag(tensorrt.BuilderFlag.TF32)
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        if tokens is not None and rows is not None:
            # Not by a profile of one shape: the plan says then that it takes any, and Triton's own backend refuses it.
            for tensor in inputs:
                tensor.shape = _shape(tensor, {"tokens": tokens, "rows": rows})
        else:
            profile = builder.create_optimization_profile()
            for tensor in inputs:
                least = _shape(tensor, dict.fromkeys((*MOST, "tokens"), 1))
                most = _shape(tensor, {**MOST, "tokens": max_tokens})
                usual = _shape(tensor, {**USUAL, "tokens": min(USUAL["tokens"], max_tokens)})
                profile.set_shape(tensor.name, least, usual, most)
            config.add_optimization_profile(profile)
        _set_timings(config)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise EngineError(f"TensorRT built no {plan_name(tokens)}; see its log")
        (folder / plan_name(tokens)).write_bytes(bytes(plan))
        # It only saves time: a folder that cannot be written is no reason to fail.
        with contextlib.suppress(OSError):
            replace_private(TIMING_CACHE, bytes(config.get_timing_cache().serialize()))
        return plan_name(tokens)

    def open(
        self, folder: Path, precision: str, threads: int, device: int | None = None, beside: Runtime | None = None
    ) -> TensorRtRuntime:
        cuda_device.require_usable(device or 0)
        return TensorRtRuntime(folder, device or 0)


PROVIDER = TensorRtProvider()


def _set_timings(config: Any) -> None:
    """Let the builder use what is kept; of another version or device TensorRT refuses it, and begins with nothing."""
    timings = TIMING_CACHE.read_bytes() if TIMING_CACHE.is_file() else b""
    for content in (timings, b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return


def _shape(tensor: Any, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a network's input with these sizes of its variable axes, which are named."""
    named = ((size, tensor.get_dimension_name(axis)) for axis, size in enumerate(tensor.shape))
    return tuple(sizes[name] if size < 0 else size for size, name in named)
