"""Terms and loading in C++ (`kernels/lora.cpp`), and how they come into the process."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from shapeshift.adapter_cache.terms import Loaded
from shapeshift.fused_decode import compiled
from shapeshift.fused_decode.adjust import Groups

KERNELS = Path(__file__).with_name("kernels")
_NAMESPACE, _LIBRARY = "shapeshift_lora", "lora"
_once = threading.Lock()


def library(cache_dir: Path) -> Path:
    """The compiled kernels; see `compiled.library`."""
    return compiled.library(cache_dir, KERNELS, _LIBRARY)


class NativeTerms:
    """See `terms.Prepared`."""

    def __init__(self, loaded: Loaded) -> None:
        self._add = getattr(torch.ops, _NAMESPACE).add.default
        self.plain = loaded

    def add(self, groups: Groups, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        self._add(outputs, inputs, self.plain.memory, self.plain.places, groups.firsts, groups.order, layer, linear)


class NativeSegmented:
    """See `terms.Form`. Made by `load`, which brings the kernels into the process."""

    name = "segmented, native"

    def prepare(self, loaded: Loaded) -> NativeTerms:
        return NativeTerms(loaded)

    def store(self, target: torch.Tensor, source: torch.Tensor, transposed: bool, scale: float) -> bool:
        """See `loader.store`; on the calling thread alone, without holding up others."""
        finite: bool = getattr(torch.ops, _NAMESPACE).store.default(target, source, transposed, scale)
        return finite


def load(cache_dir: Path, log: Callable[[str], None]) -> NativeSegmented | None:
    """The native terms, compiled into `cache_dir` unless they lie there already; None where they cannot be had.

    The reason for None is said in one line through `log`.
    """
    with _once:
        if not hasattr(getattr(torch.ops, _NAMESPACE), "add"):
            try:
                torch.ops.load_library(str(library(cache_dir)))  # type: ignore[no-untyped-call]
            except (OSError, subprocess.SubprocessError) as error:
                log(f"adapter kernels in plain torch, slower: {compiled.reason(error)}")
                return None
        return NativeSegmented()
