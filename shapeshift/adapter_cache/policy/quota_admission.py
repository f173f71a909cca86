"""Two-phase admission by quotas (Chameleon, Algorithm 1), in the reading that starves no queue.

A request is charged to its own queue. In the second phase a queue may exceed its quota by what the queues without
waiting requests leave, less what is already borrowed. If it could borrow from all queues, small requests would use up
the quota that a large request waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar


class Ledger:
    """The quota and the used tokens of each queue."""

    def __init__(self, quota: Sequence[float]) -> None:
        self.quota = [float(tokens) for tokens in quota]
        self.used = [0.0] * len(self.quota)

    @property
    def free(self) -> float:
        """Unused tokens; negative if the quotas were lowered below what is in use."""
        return sum(self.quota) - sum(self.used)

    def left(self, queue: int) -> float:
        """Unused tokens of the queue's own quota."""
        return max(0.0, self.quota[queue] - self.used[queue])

    def own_limit(self, queue: int) -> float:
        """Phase 1: the most tokens that the next request may take."""
        return min(self.left(queue), self.free)

    def shared_limit(self, queue: int, waiting: Sequence[bool]) -> float:
        """Phase 2: the same; waiting: which queues have waiting requests."""
        others = sum(self.left(other) for other in range(len(self.quota)) if other != queue and not waiting[other])
        borrowed = sum(max(0.0, used - quota) for used, quota in zip(self.used, self.quota, strict=True))
        return min(self.free, self.left(queue) + max(0.0, others - borrowed))


N = TypeVar("N")
Head = Callable[[int], float | None]
Take = Callable[[int], bool]


def first_phase(ledger: Ledger, head: Head, take: Take) -> None:
    """Admit from each queue what fits into its own quota, queue 0 first.

    head(q): tokens of the next request, None if there is none. take(q): admit and charge that request; returning False
    ends the turn of the queue.
    """
    for queue in range(len(ledger.quota)):
        while (tokens := head(queue)) is not None and tokens <= ledger.own_limit(queue) and take(queue):
            pass


def second_phase(ledger: Ledger, head: Head, take: Take, waiting: Callable[[int], bool]) -> None:
    """Admit from unused quotas, queue 0 first. waiting(q): whether queue q has waiting requests; the rest as above."""
    queues = range(len(ledger.quota))
    for queue in queues:
        while (tokens := head(queue)) is not None:
            limit = ledger.shared_limit(queue, [waiting(other) for other in queues])
            if tokens > limit or not take(queue):
                break


class TwoPhase(Generic[N]):
    """Algorithm 1 over queues of ids, for `shapeshift policy`."""

    def __init__(self, quota: Sequence[float]) -> None:
        self.ledger = Ledger(quota)
        self._queues: list[deque[tuple[N, float]]] = [deque() for _ in quota]
        self._running: dict[N, tuple[int, float]] = {}

    def submit(self, queue: int, name: N, tokens: float) -> None:
        """Add a request of `tokens` to `queue`."""
        self._queues[queue].append((name, tokens))

    def finish(self, name: N) -> None:
        """Return the tokens of a running request; does nothing for any other name."""
        queue, tokens = self._running.pop(name, (0, 0.0))
        self.ledger.used[queue] -= tokens

    def step(self) -> tuple[list[N], list[N]]:
        """The names admitted in the first and in the second phase, in order."""
        admitted: list[N] = []

        def head(queue: int) -> float | None:
            return self._queues[queue][0][1] if self._queues[queue] else None

        def take(queue: int) -> bool:
            name, tokens = self._queues[queue].popleft()
            self.ledger.used[queue] += tokens
            self._running[name] = (queue, tokens)
            admitted.append(name)
            return True

        first_phase(self.ledger, head, take)
        count = len(admitted)
        second_phase(self.ledger, head, take, lambda queue: bool(self._queues[queue]))
        return admitted[:count], admitted[count:]
