"""The rows that wait in a router, those included that no worker can take now. Used under the router's lock."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shapeshift.engines.request import Row
from shapeshift.errors import OverloadedError
from shapeshift.polymorph.assignment import Assignment


class WaitingRows:
    """Counts and bounds what an assignment holds, and keeps what it cannot take."""

    def __init__(self, assignment: Assignment, max_rows: int, max_tokens: int) -> None:
        self.rows = self.tokens = 0
        self._assignment = assignment
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        # Rows that no worker there can take, and since when.
        self._homeless: dict[Row, float] = {}

    def refuse_when_full(self, rows: Sequence[Row]) -> None:
        """Raise OverloadedError where `rows` do not fit beside what waits; when nothing waits, any do."""
        if self.rows:
            _refuse("rows", self.rows, len(rows), self._max_rows)
            _refuse("tokens", self.tokens, sum(row.tokens for row in rows), self._max_tokens)

    def put(self, rows: Sequence[Row]) -> list[str]:
        """Let those of `rows` wait that still need an answer; the workers to wake."""
        found = []
        for row in rows:
            if row.request.ended or row.done:
                continue
            self._count(row, 1)
            name = self._assignment.put(row)
            if name is None:
                self._homeless[row] = time.monotonic()
            else:
                found.append(name)
        return found

    def take(self, worker: str) -> list[Row]:
        """The rows of the worker's next call; they no longer wait."""
        rows = self._assignment.take(worker)
        for row in rows:
            self._count(row, -1)
        return rows

    def add(self, worker: str, bin_edge: int) -> bool:
        """Bring in a worker; whether it can be used."""
        return self._assignment.add(worker, bin_edge)

    def remove(self, worker: str) -> list[Row]:
        """Take a worker out; the rows that waited for it, and wait no longer."""
        rows = self._assignment.remove(worker)
        for row in rows:
            self._count(row, -1)
        return rows

    def house(self) -> list[str]:
        """Offer the rows without a worker to those that are there now; the workers to wake."""
        before, self._homeless = self._homeless, {}
        for row in before:
            self._count(row, -1)
        woken = self.put(list(before))
        self._homeless = {row: before[row] for row in self._homeless}
        return woken

    def all(self) -> list[Row]:
        """Everything that waits."""
        return [*self._homeless, *self._assignment.waiting()] if self.rows else []

    def homeless_since(self, before: float) -> list[Row]:
        """The rows that have had no worker since an instant earlier than `before` (monotonic clock)."""
        return [row for row, since in self._homeless.items() if since < before]

    def drop_ended(self) -> None:
        """Forget rows without a worker whose requests have ended; those of workers go when they are taken."""
        for row in [row for row in self._homeless if row.request.ended]:
            self._count(row, -1)
            del self._homeless[row]

    def check_integrity(self) -> None:
        """Raise AssertionError where the counts are not those of the rows."""
        rows = [*self._homeless, *self._assignment.waiting()]
        assert self.rows == len(rows), f"{self.rows} rows counted, {len(rows)} wait"
        assert self.tokens == sum(row.tokens for row in rows), "the token count is off"

    def _count(self, row: Row, sign: int) -> None:
        self.rows += sign
        self.tokens += sign * row.tokens


def _refuse(unit: str, held: int, added: int, limit: int) -> None:
    if held + added > limit:
        raise OverloadedError(f"the queue is full: {held} {unit} wait, {added} more exceed {limit}; retry later")
