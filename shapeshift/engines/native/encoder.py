"""An encoder on native kernels (`kernels/encoder.h`), and their compilation."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from shapeshift.engines.interfaces import TOKEN_OUTPUTS, Adapted, Array
from shapeshift.errors import EngineError
from shapeshift.kernels import kernel_build

KERNELS = Path(__file__).with_name("kernels")
WEIGHTS, ROWS = "encoder.safetensors", "rows.pt"
_NAMESPACE, _LIBRARY = "shapeshift_encode", "encode"
_SUFFIXES = {torch.float32: "", torch.bfloat16: "BFloat16"}
_PLACES = {"place_keys", "place_queries"}
"""What this CPU lays in its own way."""
_PLAIN = Adapted()
_lock = threading.Lock()


def library(cache_dir: Path) -> Path:
    """The compiled kernels; see `kernel_build.library`."""
    return kernel_build.library(cache_dir, KERNELS, _LIBRARY)


def load(engines: Path) -> Any:
    """The operators, compiled beside the folder that holds engines, BUILD/engines/MODEL. Raises EngineError."""
    operators = getattr(torch.ops, _NAMESPACE)
    with _lock:
        if not hasattr(operators, "pack"):
            try:
                path = library(engines.resolve().parent.with_name("kernels"))
                torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            except (OSError, subprocess.SubprocessError) as error:
                raise EngineError(f"provider native: no kernels ({kernel_build.reason(error)})") from error
    return operators


def description(folder: Path) -> dict[str, Any]:
    """What `export` says of the weights in a folder of engines."""
    with safe_open(folder / WEIGHTS, framework="pt") as opened:
        return dict(json.loads(opened.metadata()["description"]))


def value_type(folder: Path) -> torch.dtype:
    """Of what the encoder in a folder of engines computes with, but for weights in levels."""
    return _values(description(folder))


def _values(described: Mapping[str, Any]) -> torch.dtype:
    if "values" not in described:
        raise EngineError(f"provider native: {WEIGHTS} was built by another version; run `shapeshift engines`")
    return getattr(torch, described["values"])  # type: ignore[no-any-return]


def head(folder: Path, described: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of the head, in order; none where the outputs have no head. described: see `description`."""
    with safe_open(folder / WEIGHTS, framework="pt") as opened:
        return [opened.get_tensor(name) for name in described["head"]]


class EncoderFile:
    """The weights of an encoder and their description, as `export` writes them. All engines of a process share them."""

    def __init__(self, folder: Path, precision: str) -> None:
        operators = load(folder)
        content = description(folder)
        with safe_open(folder / WEIGHTS, framework="pt") as opened:
            self._tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        self._encoder, self._layers, self.outputs = content["encoder"], content["layers"], content["outputs"]
        self.pooling = content["pooling"]
        self.head = [self._tensors[name] for name in content["head"]]
        dtype = _values(content)
        kind = f"Encoder{'Levels8' if precision == 'int8' else ''}{_SUFFIXES[dtype]}"
        self._class = getattr(getattr(torch.classes, _NAMESPACE), kind)
        for layer in self._layers:
            for name in _PLACES & layer["tensors"].keys():
                key = layer["tensors"][name]
                self._tensors[key] = getattr(operators, name)(self._tensors[key], dtype)
        self._rows = folder / ROWS
        if content["panel"] != operators.panel():
            self._pack_again(operators, content["panel"], content["sizes"])

    def open(self) -> tuple[Any, Any]:
        """The native encoder, and the module that makes the outputs of its token vectors, None where it pools itself;
        each for one thread."""
        encoder = self._class(*self._part(self._encoder))
        for layer in self._layers:
            encoder.add(*self._part(layer))
        if self.pooling is not None:
            return encoder, None
        return encoder, torch.jit.load(str(self._rows))  # type: ignore[no-untyped-call]

    def _part(self, described: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        return {name: self._tensors[key] for name, key in described["tensors"].items()}, described["numbers"]

    def _pack_again(self, operators: Any, panel: int, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Lay weights that were packed on a CPU with other vectors as this one reads them."""
        for name, (outputs, inputs) in sizes.items():
            if self._tensors[name].dtype == torch.float32:
                plain = self._tensors[name].view(-1, inputs, panel).transpose(1, 2).reshape(-1, inputs)[:outputs]
                self._tensors[name] = operators.pack(plain.contiguous())


class NativeEngine:
    """See `interfaces.ThreadedEngine`: it computes packs of any shape, those of a static one without their padding."""

    def __init__(self, file: EncoderFile, threads: int, tokens: int | None, rows: int | None) -> None:
        self.tokens, self.rows = tokens, rows
        self._encoder, self._outputs_of = file.open()
        self._names, self._pooling, self._head = file.outputs, file.pooling, file.head
        self._encoder.use(threads)

    def use(self, threads: int) -> None:
        """See `interfaces.ThreadedEngine`."""
        self._encoder.use(threads)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.run_adapted(inputs, _PLAIN)

    def run_adapted(self, inputs: Mapping[str, Array], adapted: Adapted) -> dict[str, Array]:
        """See `interfaces.AdaptableEngine`."""
        tokens = [torch.from_numpy(inputs[name]) for name in ("INPUT_IDS", "SEGMENTS", "POSITIONS")]
        if self._pooling is not None:
            count, pooling = len(inputs["ROWS"]), self._pooling
            options = (adapted.terms, count, pooling["modes"], pooling["normalize"])
            vectors: Array = self._encoder.pool(*tokens, *options).numpy()
            return {"EMBEDDING": vectors}
        rows = torch.from_numpy(inputs["ROWS"])
        with torch.inference_mode():
            hidden = self._encoder.forward(*tokens, adapted.terms)[None]
            values = self._outputs(hidden, tokens, rows, self._head)
            for places, head in adapted.heads:
                its_rows = rows[torch.from_numpy(places)]
                of_head = self._outputs(hidden, tokens, its_rows, head)
                for name in self._names:
                    if name in TOKEN_OUTPUTS:
                        at = np.isin(inputs["SEGMENTS"], its_rows.numpy())
                        values[name][at] = of_head[name][at]
                    else:
                        values[name][places] = of_head[name]
        return values

    def _outputs(
        self, hidden: torch.Tensor, tokens: Sequence[torch.Tensor], rows: torch.Tensor, head: Sequence[torch.Tensor]
    ) -> dict[str, Array]:
        outputs = self._outputs_of(hidden, *tokens, rows, *head)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        return {name: values.numpy() for name, values in zip(self._names, outputs, strict=True)}
