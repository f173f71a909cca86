"""LoRA in C++ (`kernels/lora.cpp`), and the compilation of these kernels."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from shapeshift.adapter_cache.lora.batch import BatchAdapters
from shapeshift.fused_decode.interfaces import Groups
from shapeshift.kernels import kernel_build

KERNELS = Path(__file__).with_name("kernels")
_NAMESPACE, _LIBRARY = "shapeshift_lora", "lora"
_load_lock = threading.Lock()


def library(cache_dir: Path, progress: kernel_build.Progress = lambda step: None) -> Path:
    """The compiled kernels; see `kernel_build.library`."""
    return kernel_build.library(cache_dir, KERNELS, _LIBRARY, progress)


class NativeAdapters:
    """See `batch.PreparedAdapters`."""

    def __init__(self, adapters: BatchAdapters) -> None:
        self._add = getattr(torch.ops, _NAMESPACE).add.default
        self.arrays = adapters

    def add(self, groups: Groups, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        adapters = self.arrays
        self._add(outputs, inputs, adapters.memory, adapters.places, groups.firsts, groups.order, layer, linear)


class NativeLora:
    """See `batch.LoraKernels`. Created by `load`, which loads the kernels into the process."""

    name = "segmented, native"
    fits_graphs = False

    def prepare(self, adapters: BatchAdapters) -> NativeAdapters:
        return NativeAdapters(adapters)

    def store(self, target: torch.Tensor, source: torch.Tensor, transposed: bool, scale: float) -> bool:
        # On the calling thread alone; other threads continue.
        finite: bool = getattr(torch.ops, _NAMESPACE).store.default(target, source, transposed, scale)
        return finite


def load(cache_dir: Path, log: Callable[[str], None]) -> NativeLora | None:
    """The native kernels, compiled into `cache_dir` unless it has them already; None if that fails.

    The reason of a failure is logged in one line.
    """
    with _load_lock:
        if not hasattr(getattr(torch.ops, _NAMESPACE), "add"):
            try:
                torch.ops.load_library(str(library(cache_dir)))  # type: ignore[no-untyped-call]
            except (OSError, subprocess.SubprocessError) as error:
                log(f"adapter kernels in plain torch, slower: {kernel_build.reason(error)}")
                return None
        return NativeLora()
