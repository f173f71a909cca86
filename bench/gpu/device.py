"""Where the parts measure: a GPU, or the CPU for a rehearsal, which shows that the parts run and no figure."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from client import hardware
from shapeshift.engines import gpu

Step = Callable[[], object]
_WARM_UPS = 3
_COPIED = 1 << 30
"""Bytes that a copy reads to measure bandwidth: more than any cache holds."""
_COPIED_IN_REHEARSAL = 1 << 20
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Device:
    """number: of a GPU; None: the CPU."""

    number: int | None

    @property
    def torch_device(self) -> torch.device:
        """The device as torch has it."""
        return torch.device("cpu" if self.number is None else f"cuda:{self.number}")

    @property
    def precision(self) -> str:
        """What models are computed in: bf16 or, where the GPU lacks it, f16; f32 on a CPU."""
        if self.number is None:
            return "f32"
        return "bf16" if gpu.describe(self.number).has_bf16 else "f16"

    @property
    def dtype(self) -> torch.dtype:
        """`precision` as torch has it."""
        return DTYPES[self.precision]

    def describe(self) -> dict[str, object]:
        """The machine, and the GPU with its compute capability and memory in MiB."""
        machine: dict[str, object] = dict(hardware.describe())
        if self.number is not None:
            card = gpu.describe(self.number)
            machine["gpu"] = f"{card.name}, compute capability {'.'.join(map(str, card.capability))}"
            machine["gpu_memory_mb"] = round(card.memory_mb)
        return machine | {"torch": torch.__version__, "cuda": torch.version.cuda}

    def wait(self) -> None:
        """Return when the device has finished."""
        if self.number is not None:
            torch.cuda.synchronize(self.number)

    def free(self) -> None:
        """Give back the memory of what is no longer used."""
        gc.collect()
        if self.number is not None:
            torch.cuda.empty_cache()

    def compiled(self, function: Callable[..., Any], dynamic: bool | None = None, mode: str = "") -> Callable[..., Any]:
        """`function` by torch.compile in this mode; in a rehearsal it is traced, without the minutes of making code."""
        compiled: Callable[..., Any] = (
            torch.compile(function, dynamic=dynamic, backend="eager")
            if self.number is None
            else torch.compile(function, dynamic=dynamic, mode=mode or None)
        )
        return compiled

    def bandwidth(self) -> float:
        """Bytes a second that a copy within the device's memory reads and writes, the best of ten."""
        source = torch.ones(_COPIED_IN_REHEARSAL if self.number is None else _COPIED, dtype=torch.uint8)
        source = source.to(self.torch_device)
        target = torch.empty_like(source)
        best = min(self.seconds(lambda: target.copy_(source)) for _ in range(10))
        return 2 * source.numel() / best

    def seconds(self, step: Step) -> float:
        """The time of one step. The clock is read when the device has finished."""
        self.wait()
        before = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - before

    def in_turn(self, variants: Mapping[str, Step], rounds: int) -> dict[str, float]:
        """Median milliseconds of each variant. Each round runs all of them, after a few unmeasured rounds."""
        times: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(_WARM_UPS + rounds):
            for name, step in variants.items():
                took = self.seconds(step) * 1e3
                if turn >= _WARM_UPS:
                    times[name].append(took)
        return {name: statistics.median(values) for name, values in times.items()}
