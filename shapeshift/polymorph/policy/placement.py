"""Which processes hold the engines of a model with `placement: auto`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Placement:
    """name: of the placement; workers: processes beside the front, 0 for inline; reason: for the user."""

    name: Literal["inline", "resident", "partitioned"]
    workers: int
    reason: str


def decide(
    engines: int, engine_mb: float, memory_mb: float, gpus: int, workers: int = 0, has_objective: bool = True
) -> Placement:
    """The placement for a model on one machine.

    engines: number of them; engine_mb: memory of one; memory_mb: limit of one process (on a GPU: of its memory);
    gpus: devices, 0 on a CPU; workers: requested by the user, 0 if not; has_objective: whether there is a latency
    objective, by which bins are divided among workers.

    On a CPU, and on one GPU, one process serves best: its threads share a queue, and no data passes between processes.
    With workers, each holds all engines where they fit, so that any worker takes any text; else one, as in Arlo.
    Raises ValueError naming the field.
    """
    if engines < 1 or engine_mb < 0 or gpus < 0 or workers < 0:
        raise ValueError(f"engines, engine_mb, gpus, workers: got {engines}, {engine_mb}, {gpus}, {workers}")
    if gpus == 0 and workers == 0:
        return Placement("inline", 0, "no GPU and no workers requested: one process, one thread for each core")
    if gpus == 1 and workers == 0:
        return Placement("inline", 0, "one GPU and no workers requested: one process")
    count = workers or gpus
    needed = engines * engine_mb
    size = f"{engines} engines of about {engine_mb:.0f} MiB, {memory_mb:.0f} MiB a worker"
    if needed <= memory_mb:
        return Placement("resident", count, f"{size}: every worker holds all, so any takes any text")
    if count == 1:
        return Placement("resident", 1, f"{size}: one worker must take every text; it holds what fits")
    if not has_objective:
        return Placement("resident", count, f"{size}: without slo_ms bins cannot be divided; each holds what fits")
    return Placement("partitioned", count, f"{size}: each worker holds one")
