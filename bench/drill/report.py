"""The rows of a drill."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from bench.common.output import Row
from bench.drill.drill import Result
from bench.drill.outcomes import CODED, CUT, INTERNAL, LOST, RIGHT, WRONG

_KINDS = {"right": RIGHT, "coded": CODED, "cut": CUT, "internal": INTERNAL, "lost": LOST, "wrong": WRONG}


def row(result: Result) -> Row:
    """The row of one fault; what stays behind is the difference of quiet states after and before it."""
    if result.cost is None:
        return {"fault": result.name, "": f"left out: {result.skipped}"}
    before, after = result.before, result.after
    whole_s = "never" if math.isinf(result.cost.whole_s) else f"{result.cost.whole_s:.1f}"
    return {
        "fault": result.name,
        "open": result.cost.in_flight,
        **{name: result.cost.counts[kind] for name, kind in _KINDS.items()},
        "held": result.cost.excused,
        "whole s": whole_s,
        "bound": round(result.within_s),
        "procs": after.processes - before.processes,
        "RSS MB": round(after.rss_mb - before.rss_mb),
        "fds": after.fds - before.fds,
        "threads": after.threads - before.threads,
        "regions": after.regions - before.regions,
        "": "MISSED" if result.missed else "",
    }


def record(result: Result) -> dict[str, Any]:
    """The result as JSON values; an infinite time becomes null."""
    values = dataclasses.asdict(result)
    if values["cost"] is not None and math.isinf(values["cost"]["whole_s"]):
        values["cost"]["whole_s"] = None
    return values
