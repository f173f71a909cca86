"""The rows that wait in a router, those included that no worker can take now. Used under the router's lock."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shapeshift.engines.execution.request import Row
from shapeshift.polymorph.router.assignment import Assignment
from shapeshift.serving.bounds import Bound


class PendingRows:
    """Counts and bounds the rows of an assignment, and holds the orphans: rows that no worker can take."""

    def __init__(self, assignment: Assignment, max_rows: int, max_tokens: int) -> None:
        self.rows = self.tokens = 0
        self._assignment = assignment
        self._rows_bound = Bound("queue_rows", max_rows, "rows")
        self._tokens_bound = Bound("queue_tokens", max_tokens, "tokens")
        # Since when each is an orphan, on the monotonic clock.
        self._orphans: dict[Row, float] = {}

    def require_capacity(self, rows: Sequence[Row]) -> None:
        """Raise OverloadedError where `rows` do not fit. An empty queue takes any number."""
        if self.rows:
            self._rows_bound.require(self.rows, len(rows))
            self._tokens_bound.require(self.tokens, sum(row.tokens for row in rows))

    def put(self, rows: Sequence[Row]) -> list[str]:
        """Add the rows that still need an answer. Returns the workers that can take them."""
        takers = []
        for row in rows:
            if not row.is_open:
                continue
            self._count(row, 1)
            worker = self._assignment.put(row)
            if worker is None:
                self._orphans[row] = time.monotonic()
            else:
                takers.append(worker)
        return takers

    def take(self, worker: str) -> list[Row]:
        """Remove and return the rows of the worker's next call."""
        rows = self._assignment.take(worker)
        for row in rows:
            self._count(row, -1)
        return rows

    def add_worker(self, worker: str, bin_edge: int) -> bool:
        """Add a worker; whether it can be used."""
        return self._assignment.add(worker, bin_edge)

    def remove_worker(self, worker: str) -> list[Row]:
        """Remove a worker, and return the rows that waited for it alone; they no longer wait."""
        rows = self._assignment.remove(worker)
        for row in rows:
            self._count(row, -1)
        return rows

    def reassign_orphans(self) -> list[str]:
        """Offer the orphans to the workers present. Returns the workers that can take them."""
        since, self._orphans = self._orphans, {}
        for row in since:
            self._count(row, -1)
        takers = self.put(list(since))
        self._orphans = {row: since[row] for row in self._orphans}
        return takers

    def all(self) -> list[Row]:
        """Every row that waits."""
        return [*self._orphans, *self._assignment.waiting()] if self.rows else []

    def orphans_since(self, before: float) -> list[Row]:
        """The rows that became orphans earlier than `before` (monotonic clock)."""
        return [row for row, since in self._orphans.items() if since < before]

    def drop_finished_orphans(self) -> None:
        """Remove orphans whose requests have finished. Other rows are dropped when a worker takes them."""
        for row in [row for row in self._orphans if row.request.finished]:
            self._count(row, -1)
            del self._orphans[row]

    def check_integrity(self) -> None:
        """Raise AssertionError where the counts are not those of the rows."""
        rows = [*self._orphans, *self._assignment.waiting()]
        assert self.rows == len(rows), f"{self.rows} rows counted, {len(rows)} wait"
        assert self.tokens == sum(row.tokens for row in rows), "the token count is off"

    def _count(self, row: Row, sign: int) -> None:
        self.rows += sign
        self.tokens += sign * row.tokens
