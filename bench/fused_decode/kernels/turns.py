"""Pieces of work that take turns on one thread, so that other load on the machine meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

from bench.common.foreign_load import ForeignLoad


def in_turns(works: Mapping[str, Callable[[], object]], turns: int, times: int = 1) -> tuple[dict[str, float], float]:
    """Median milliseconds of processor time of each work, and the cores that other processes kept busy meanwhile.

    A turn is a run that is not timed and `times` timed ones. Only the calling thread is measured.
    """
    found: dict[str, list[float]] = {name: [] for name in works}
    with ForeignLoad() as foreign:
        for _ in range(turns):
            for name, work in works.items():
                work()
                for _ in range(times):
                    start = time.thread_time()
                    work()
                    found[name].append((time.thread_time() - start) * 1e3)
    return {name: median(values) for name, values in found.items()}, foreign.cores
