"""OpenVINO: one model file, reshaped and compiled for each static length."""

from __future__ import annotations

import functools
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.engines.hardware import resident_mb
from shapeshift.engines.interfaces import MAX_TOKENS, Array, Runtime
from shapeshift.errors import UnsupportedError

MODEL_FILE = "model.xml"
# A dynamic engine compiles kernels for each shape that it sees and keeps the last ones. With the default, 5000, the
# process grows for hours, by more than a GB where lengths and numbers of rows vary, and gains 3% of speed.
_KEPT_KERNELS = 128
# Where tokens merge, each layer has another number of them: a batch size needs a hundred kernels and 32 MB. With 128 an
# image model whose batches vary from 1 to 8 takes 1.4 times the processor time.
_KEPT_WHERE_TOKENS_MERGE = 1000
_CONVERSION = "openvino.tools.ovc"
_KEEPS_F32 = {"name": "DisablePrecisionConversion", "version": "0", "value": "dynamic:bf16,f16"}
_importing, _making = threading.Lock(), threading.Lock()


class OpenVinoEngine:
    """A compiled model with one infer request. Static inputs are written in place into its tensors."""

    def __init__(
        self, compiled: Any, inputs: Sequence[str], outputs: Sequence[str], tokens: int | None, rows: int | None
    ) -> None:
        self.tokens = tokens
        self.rows = rows
        self._request = compiled.create_infer_request()
        # Compilation may change names but keeps the order. An input still has its own name, perhaps among others.
        self._inputs = list(inputs)
        self._outputs = [(name, index) for index, name in enumerate(outputs)]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        request = self._request
        if self.tokens is None:
            request.infer({name: inputs[name] for name in self._inputs}, share_inputs=True)
        else:
            for name in self._inputs:
                request.get_tensor(name).data[:] = inputs[name]
            request.infer()
        return {name: request.get_output_tensor(index).data for name, index in self._outputs}


def _library() -> Any:
    """The package openvino, without what it imports where it can.

    openvino_telemetry reports its use. The conversion of models, which only `export` needs, takes half of the time.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    with _importing:
        if "openvino" not in sys.modules:
            sys.modules[_CONVERSION] = None  # type: ignore[assignment]
        try:
            import openvino
        finally:
            if _CONVERSION in sys.modules and sys.modules[_CONVERSION] is None:
                del sys.modules[_CONVERSION]
    return openvino


def _core() -> Any:
    # `functools.cache` alone would let two threads make two.
    with _making:
        return _one_core()


@functools.cache
def _one_core() -> Any:
    """The one Core of this process, which lives until the process ends.

    On a CPU with AMX a Core gives the calling thread a larger signal stack, and takes it back when it is destroyed. Of
    two Cores that are not destroyed in reverse order, the second restores a stack that the first has unmapped: the
    next signal with a handler (Ctrl-C in a build) then ends the process with SIGSEGV.
    """
    openvino = _library()
    # The binding builds its type table at first use, under a C++ lock and while it releases the GIL: two threads
    # with a concurrent first use deadlock. This call builds the table.
    openvino.Type.i64.to_dtype()
    return openvino.Core()


class OpenVinoRuntime:
    """One model in memory. Its clones are reshaped, so that all lengths share its weights."""

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        self._core = _core()
        self._model = self._core.read_model(folder / MODEL_FILE)
        merges = any(operation.get_type_name() == "TopK" for operation in self._model.get_ops())
        self._config = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": precision,
            # Each compiled model numbers its streams from core 0: with pinning, all engine threads share one core.
            "ENABLE_CPU_PINNING": False,
            "CPU_RUNTIME_CACHE_CAPACITY": _KEPT_WHERE_TOKENS_MERGE if merges else _KEPT_KERNELS,
        }

    def engine(self, tokens: int | None, rows: int | None) -> OpenVinoEngine:
        model = self._model.clone()
        inputs, outputs = ([port.get_any_name() for port in ports] for ports in (model.inputs, model.outputs))
        if tokens is not None:
            model.reshape({name: [rows] if name == "ROWS" else [1, tokens] for name in inputs})
        compiled = self._core.compile_model(model, "CPU", self._config)
        return OpenVinoEngine(compiled, inputs, outputs, tokens, rows)

    def used_mb(self) -> float:
        return resident_mb()


class OpenVinoProvider:
    """See `interfaces.Provider`."""

    name = "openvino"

    def version(self) -> str:
        try:
            openvino = _library()
        except ImportError:
            raise UnsupportedError("provider openvino: not installed; run `pip install openvino`") from None
        return str(openvino.__version__)

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        import torch

        openvino = _library()
        from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
        from openvino.tools.ovc import convert_model

        shapes = []
        for name, axes in module.input_axes.items():
            sizes = [-1 if axis in axes else size for axis, size in enumerate(example[name].shape)]
            shapes.append((name.lower(), openvino.PartialShape(sizes), openvino.Type(example[name].dtype)))
        tensors = {name.lower(): torch.from_numpy(example[name]) for name in module.input_axes}
        # Torch would trace again and compare; builds hold the engine against the module themselves.
        traced = TorchScriptPythonDecoder(module, example_input=tensors, trace_kwargs={"check_trace": False})
        model = convert_model(traced, input=shapes)
        for port in model.inputs:
            port.get_tensor().set_names({port.get_any_name().upper()})
        for port, name in zip(model.outputs, module.output_names, strict=True):
            port.get_tensor().set_names({name})
        in_f32 = getattr(module, "f32_modules", ()) if precision != "f32" else ()
        _replace_divisions(model, in_f32)
        # Weights stay f32 in the file: compression to f16 loses accuracy in both precisions.
        openvino.save_model(model, folder / MODEL_FILE, compress_to_fp16=False)
        _mark_f32(folder / MODEL_FILE, in_f32)
        return [MODEL_FILE, "model.bin"]

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        return MODEL_FILE

    def open(
        self, folder: Path, precision: str, threads: int, device: int | None = None, beside: Runtime | None = None
    ) -> OpenVinoRuntime:
        return OpenVinoRuntime(folder, precision, threads)


PROVIDER = OpenVinoProvider()


# Submodules stay in f32 where INFERENCE_PRECISION_HINT asks for bf16. The CPU plugin computes an operation in f32 if
# the model file marks it with the runtime attribute DisablePrecisionConversion (OpenVINO pull requests 21440 and
# 34311). It does not copy the attribute when it replaces an operation: a division (by a power and a product) and a
# matrix product with constant weights lose it.


def _replace_divisions(model: Any, modules: Collection[str]) -> None:
    """Replace each division of a tensor by its norms in `modules` by operations that the plugin keeps as they are.

    A power with one exponent is replaced too. One with an exponent for each column is not.
    """
    from openvino import opset13 as operations

    for divide in model.get_ordered_ops():
        if divide.get_type_name() != "Divide" or not _is_inside(divide.get_friendly_name(), modules):
            continue
        width = divide.input(0).get_partial_shape()[-1].get_length()
        exponents = operations.constant(np.full(width, -1.0, np.float32))
        inverse = operations.power(divide.input_value(1), exponents)
        product = operations.multiply(divide.input_value(0), inverse)
        name = divide.get_friendly_name()
        inverse.set_friendly_name(f"{name}/inverse")
        product.set_friendly_name(name)
        divide.output(0).replace(product.output(0))


def _mark_f32(file: Path, modules: Collection[str]) -> None:
    """Mark every operation of `modules` in the model file."""
    tree = ElementTree.parse(file)
    for layer in tree.iterfind("./layers/layer"):
        if _is_inside(layer.get("name", ""), modules):
            information = layer.find("rt_info")
            if information is None:
                information = ElementTree.SubElement(layer, "rt_info")
            ElementTree.SubElement(information, "attribute", _KEEPS_F32)
    tree.write(file, encoding="utf-8", xml_declaration=True)


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether an operation's name, "__module.blocks.0.matching/aten::max/ReduceMax", is that of one of the modules."""
    return name.partition("/")[0].rpartition(".")[2] in modules
