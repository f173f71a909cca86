"""Which queries share a batch: those of like arrival, deadline and utility (OTAS, Algorithm 1). Times in ms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """What Algorithm 1 knows of a query: s_r, d_r and u_r."""

    @property
    def arrived(self) -> float: ...

    @property
    def deadline(self) -> float: ...

    @property
    def utility(self) -> float: ...


Q = TypeVar("Q", bound=Timed)


@dataclass(frozen=True)
class BatchRules:
    """The paper's delta, epsilon, eta and mu, with its values.

    window_ms    a batch takes queries that arrive within so long of its first one
    size         most queries a batch
    deadline_ms  most difference between a query's deadline and its batch's
    utility      most difference between a query's utility and that of the batch's first
    """

    window_ms: float = 500.0
    size: int = 64
    deadline_ms: float = 500.0
    utility: float = 0.8


class Batch(Generic[Q]):
    """Queries that will run together. Never empty while it stands in a queue."""

    def __init__(self, queries: Sequence[Q]) -> None:
        self.set(queries)

    def __len__(self) -> int:
        return len(self.queries)

    def set(self, queries: Iterable[Q]) -> None:
        """Hold these instead; the earliest arrival and deadline and the first utility are theirs from now on."""
        self.queries = list(queries)
        self.arrived = min(query.arrived for query in self.queries)
        self.deadline = min(query.deadline for query in self.queries)
        self.utility = self.queries[0].utility

    def add(self, query: Q) -> None:
        self.queries.append(query)
        self.arrived = min(self.arrived, query.arrived)
        self.deadline = min(self.deadline, query.deadline)

    def takes(self, query: Q, rules: BatchRules) -> bool:
        """Lines 4 to 9: whether size, deadline and utility allow it; what equals a limit is allowed."""
        return (
            len(self.queries) < rules.size
            and abs(self.deadline - query.deadline) <= rules.deadline_ms
            and abs(self.utility - query.utility) <= rules.utility
        )


class BatchQueue(Generic[Q]):
    """The batches that wait, in order of creation."""

    def __init__(self, rules: BatchRules) -> None:
        self.rules = rules
        self.batches: list[Batch[Q]] = []

    def add(self, query: Q) -> None:
        """Put a query into the newest batch that takes it, or into a new one."""
        for batch in reversed(self.batches):
            if batch.arrived + self.rules.window_ms < query.arrived:
                break
            if batch.takes(query, self.rules):
                batch.add(query)
                return
        self.batches.append(Batch([query]))
