"""Two-phase admission by quotas (Chameleon, Algorithm 1), in the reading that starves nobody.

A request is charged to its own queue. In the second phase a queue may go beyond its quota by what the queues with
nothing waiting leave, less what is already borrowed: were it what all queues leave, small requests would eat the
quota that a large one waits to have whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar


class Ledger:
    """Tokens that each queue may hold and does hold."""

    def __init__(self, quota: Sequence[float], used: Sequence[float] | None = None) -> None:
        self.quota = [float(tokens) for tokens in quota]
        self.used = [0.0] * len(self.quota) if used is None else list(used)

    @property
    def free(self) -> float:
        """Tokens that nobody holds; negative where quotas were lowered under what is held."""
        return sum(self.quota) - sum(self.used)

    def left(self, queue: int) -> float:
        """What remains of a queue's own quota."""
        return max(0.0, self.quota[queue] - self.used[queue])

    def own_limit(self, queue: int) -> float:
        """Phase 1: most tokens of the next request."""
        return min(self.left(queue), self.free)

    def shared_limit(self, queue: int, waiting: Sequence[bool]) -> float:
        """Phase 2: the same; waiting: which queues have anything left."""
        others = sum(self.left(other) for other in range(len(self.quota)) if other != queue and not waiting[other])
        borrowed = sum(max(0.0, used - quota) for used, quota in zip(self.used, self.quota, strict=True))
        return min(self.free, self.left(queue) + max(0.0, others - borrowed))


N = TypeVar("N")
Head = Callable[[int], float | None]
Take = Callable[[int], bool]


def first_phase(ledger: Ledger, head: Head, take: Take) -> None:
    """Admit from each queue what its own quota holds, queue 0 first.

    head(q): tokens of the request that is next, None where there is none. take(q): admit that request and charge
    it; False where it cannot be after all, which ends the queue's turn.
    """
    for queue in range(len(ledger.quota)):
        while (tokens := head(queue)) is not None and tokens <= ledger.own_limit(queue) and take(queue):
            pass


def second_phase(ledger: Ledger, head: Head, take: Take, waiting: Callable[[int], bool]) -> None:
    """Admit from what is spare, queue 0 first. waiting(q): whether anything waits there; the others as above."""
    queues = range(len(ledger.quota))
    for queue in queues:
        while (tokens := head(queue)) is not None:
            limit = ledger.shared_limit(queue, [waiting(other) for other in queues])
            if tokens > limit or not take(queue):
                break


class TwoPhase(Generic[N]):
    """Queues of ids alone: Algorithm 1 as it can be tried by hand."""

    def __init__(self, quota: Sequence[float]) -> None:
        self.ledger = Ledger(quota)
        self._queues: list[deque[tuple[N, float]]] = [deque() for _ in quota]
        self._running: dict[N, tuple[int, float]] = {}

    def submit(self, queue: int, name: N, tokens: float) -> None:
        """Let a request of `tokens` wait in `queue`."""
        self._queues[queue].append((name, tokens))

    def finish(self, name: N) -> None:
        """A running request returns its tokens; one that does not run changes nothing."""
        queue, tokens = self._running.pop(name, (0, 0.0))
        self.ledger.used[queue] -= tokens

    def step(self) -> tuple[list[N], list[N]]:
        """Who is admitted in the first phase and who in the second, in order."""
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
