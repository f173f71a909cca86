"""The table of a drill."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from bench.drill.drill import Result
from bench.drill.outcomes import CODED, CUT, INTERNAL, LOST, RIGHT, WRONG

_WIDTH = 40


def table(results: Sequence[Result]) -> Iterator[str]:
    """One line a fault."""
    yield (
        f"  {'fault':{_WIDTH}}{'open':>5}{'right':>6}{'coded':>6}{'cut':>5}{'intern':>7}{'lost':>5}{'held':>5}"
        f"{'wrong':>6}{'whole s':>8}{'bound':>6} | {'procs':>5}{'RSS MB':>7}{'fds':>5}{'thr':>5}{'shm':>4}"
    )
    for result in results:
        yield line(result)


def line(result: Result) -> str:
    """The line of one fault; what stays behind is the difference of quiet states after and before it."""
    if result.cost is None:
        return f"  {result.name:{_WIDTH}} left out: {result.skipped}"
    counts, before, after = result.cost.counts, result.before, result.after
    whole = "never" if math.isinf(result.cost.whole_s) else f"{result.cost.whole_s:.1f}"
    return (
        f"  {result.name:{_WIDTH}}{result.cost.in_flight:5}{counts[RIGHT]:6}{counts[CODED]:6}{counts[CUT]:5}"
        f"{counts[INTERNAL]:7}{counts[LOST]:5}{result.cost.excused:5}{counts[WRONG]:6}"
        f"{whole:>8}{result.within_s:6.0f} | {after.processes - before.processes:+5}"
        f"{after.rss_mb - before.rss_mb:+7.0f}{after.fds - before.fds:+5}{after.threads - before.threads:+5}"
        f"{after.regions - before.regions:+4}{'  MISSED' if result.missed else ''}"
    )


def record(result: Result) -> dict[str, Any]:
    """The result as JSON values; an infinite time becomes null."""
    values = dataclasses.asdict(result)
    if values["cost"] is not None and math.isinf(values["cost"]["whole_s"]):
        values["cost"]["whole_s"] = None
    return values
