"""`python -m bench.fused_decode.ranks`: one iteration on two processes of one thread, against one process of two.

Llama of 110 million random parameters; decode steps of 1, 8 and 32 requests with 64 tokens each in the cache. The three
systems take turns, so that other load on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.foreign_load import ForeignLoad
from bench.common.output import FOLDER, Output, progress
from bench.peers import random_llama
from shapeshift.fused_decode.model import kernel_build

KERNELS = Path("build/kernels")
ROWS = (1, 8, 32)
CONTEXT = 64
THREADS = 2
_IN_ONE, _BY_KERNEL, _RANKS = "one process", "one process, kernel by kernel", "two ranks"


class System:
    """A loaded model whose steps are timed with so many threads in this process."""

    def __init__(self, name: str, model: Any, threads: int) -> None:
        self.name, self.model = name, model
        self._threads = threads

    def milliseconds(self, step: Any, count: int) -> list[float]:
        """Of `count` steps, after one that is not timed."""
        import torch

        torch.set_num_threads(self._threads)
        self.model.forward(step)
        times_ms = []
        for _ in range(count):
            start = time.perf_counter()
            self.model.forward(step)
            times_ms.append((time.perf_counter() - start) * 1e3)
        return times_ms


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12, help="turns of each system in each cell")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    options = parser.parse_args(arguments)
    # Before torch is imported.
    kernel_build.limit_spinning()
    settings = {"turns": options.turns, "steps": options.steps, "context": CONTEXT, "threads": THREADS}
    output = Output("fused_decode.ranks", settings, "fused_decode-ranks")
    model = random_llama.ensure(FOLDER / "llama-110m")
    output.say(f"  {'':6}{'requests':>9}{_IN_ONE:>14}{'by kernel':>12}{_RANKS:>12}   ms a step; ratio: of one process")
    cells = []
    for precision in ("f32", "bf16"):
        systems = _systems(model, precision)
        for rows in ROWS:
            progress(f"{precision}, {rows} requests")
            with ForeignLoad() as foreign:
                cell = _cell(systems, rows, options.turns, options.steps)
            times = [cell[system.name] for system in systems]
            output.say(
                f"  {precision:6}{rows:>9}{times[0]:>14.1f}{times[1]:>12.1f}{times[2]:>12.1f}"
                f"   speed {times[0] / times[2]:.2f}, by kernel {times[1] / times[2]:.2f}"
                f"   (other processes: {foreign.cores:.2f} cores)"
            )
            cells.append({"precision": precision, "rows": rows, "foreign": foreign.cores, **cell})
        for system in systems:
            system.model.close()
    output.data |= {"cells": cells}
    output.save()
    return 0


def _systems(folder: Path, precision: str) -> list[System]:
    from shapeshift.fused_decode.loading import load_runtime
    from shapeshift.fused_decode.settings import FusedDecodeSettings

    def load(ranks: int) -> Any:
        settings = FusedDecodeSettings(
            checkpoint=str(folder),
            precision=precision,
            max_concurrency=max(ROWS),
            max_length=2 * CONTEXT,
            threads=THREADS,
            tensor_parallel_size=ranks,
        )
        return load_runtime(folder, settings, KERNELS, "cpu", lambda line: None)

    by_kernel = load(1)
    by_kernel.fused_forward = None
    return [
        System(_IN_ONE, load(1), THREADS),
        System(_BY_KERNEL, by_kernel, THREADS),
        System(_RANKS, load(2), THREADS // 2),
    ]


def _cell(systems: list[System], rows: int, turns: int, steps: int) -> dict[str, float]:
    """Median ms of a step of each system, by its name."""
    import torch

    from shapeshift.fused_decode.interfaces import StepBatch

    slots = torch.arange(rows, dtype=torch.int32)
    step = StepBatch(
        tokens=torch.arange(rows) + 100,
        slots=slots,
        starts=torch.full((rows,), CONTEXT, dtype=torch.int32),
        lengths=torch.ones(rows, dtype=torch.int32),
        wanted=torch.arange(rows),
    )
    times: dict[str, list[float]] = {system.name: [] for system in systems}
    for _ in range(turns):
        for system in systems:
            times[system.name] += system.milliseconds(step, steps)
    return {name: median(values) for name, values in times.items()}


if __name__ == "__main__":
    sys.exit(main())
