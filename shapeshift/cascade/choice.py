"""The candidate for a task's targets, chosen from its table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shapeshift.cascade import select
from shapeshift.cascade.table import Candidate, Table
from shapeshift.errors import InvalidInputError


@dataclass(frozen=True)
class Choice:
    """selected: the fastest that meets both targets, None: no candidate does; nearest: what to offer then."""

    table: Table
    selected: Candidate | None
    nearest: Candidate

    @property
    def serving(self) -> Candidate:
        """What serves, met targets or not."""
        return self.selected or self.nearest


def choose(table: Table, min_accuracy: float, max_latency_ms: float) -> Choice:
    """The candidate for these targets (0: none). Raises InvalidInputError where no candidate is practical at all."""
    known = {one.name: one for one in table.candidates}
    measured = [one.measured for one in table.candidates]
    most = max_latency_ms or math.inf
    selected, nearest = (function(measured, min_accuracy, most) for function in (select.select, select.nearest))
    if nearest is None:
        allowed = f"at least one whose 75th percentile is within {select.TAIL} times its slowest model"
        raise InvalidInputError("candidates", len(measured), allowed)
    return Choice(table, known[selected.name] if selected else None, known[nearest.name])
