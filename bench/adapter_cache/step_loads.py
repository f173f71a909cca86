"""How loading an adapter delays the decode steps that run meanwhile; part of bench.adapter_cache.step."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from bench.adapter_cache.step_adapters import CONTEXT, RANKS, records_of


def measure(folder: Path, adapters: list[Path], stated: str, kernels: Path, rounds: int) -> tuple[float, float, float]:
    """p99 in ms of a step of 16 rows, alone and during loads of the largest adapter; median seconds of a load.

    Phases of 25 steps of each kind alternate.
    """
    import threading

    import torch

    from shapeshift.adapter_cache.lora import native
    from shapeshift.adapter_cache.lora.segmented import TorchLora
    from shapeshift.adapter_cache.memory.loader import Loader
    from shapeshift.engines.hardware import cores
    from shapeshift.fused_decode.interfaces import StepBatch
    from shapeshift.fused_decode.model.cpu_runtime import DecodeModel

    count = 16
    model = DecodeModel.load(
        folder, precision=stated, slots=count, max_length=CONTEXT * 2, threads=cores(), cache_dir=kernels, log=print
    )
    largest = records_of(folder, [adapters[RANKS.index(max(RANKS))]], model)[0]
    target = torch.zeros(largest.elements, dtype=model.memory.dtype)
    fast = native.load(kernels, print)
    ended, took = threading.Event(), []

    def done(one: Any, error: Exception | None, seconds: float) -> None:
        took.append(seconds)
        ended.set()

    busy = Loader(done, (fast or TorchLora()).store, lambda: True)
    rows = torch.arange(count, dtype=torch.int32)
    model.forward(StepBatch(torch.randint(9, 999, (count * CONTEXT,)), rows, rows * 0, rows * 0 + CONTEXT, rows.long()))
    batch = StepBatch(torch.randint(9, 999, (count,)), rows, rows * 0 + CONTEXT, rows * 0 + 1, rows.long())
    seen: dict[bool, list[float]] = {False: [], True: []}
    for phase in range(2 * rounds + 2):
        disturbed = bool(phase % 2)
        ended.set()
        for _ in range(25):
            if disturbed and ended.is_set():
                ended.clear()
                busy.submit(largest, target)
            before = time.perf_counter()
            model.forward(batch)
            if phase > 1:
                seen[disturbed].append((time.perf_counter() - before) * 1e3)
        ended.wait(10)
    busy.close()
    calm, loading = (statistics.quantiles(seen[kind], n=100)[98] for kind in (False, True))
    return calm, loading, statistics.median(took)
