"""The bounds of queues, the one form of their refusals, and who goes first among those that wait.

A refusal names parameter, value, limit, and what to do.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from shapeshift.errors import OverloadedError
from shapeshift.serving.metrics import Counter, Gauges
from shapeshift.settings import require

# Of the newest answer in a mean of answers.
_SMOOTHING = 1 / 32
# Before the first answers, as measured under load: a queue fills before any of them comes.
_FIRST_DEVIATION = 0.03
_MAX_LATENESS = 4.0


@dataclass(frozen=True)
class Bound:
    """The most `unit` that may wait or run, set by the parameter `parameter`."""

    parameter: str
    limit: int
    unit: str
    state: str = "wait"

    def require(self, held: int, added: int = 1) -> None:
        """Raise OverloadedError where `added` more do not fit beside the `held` ones."""
        if held + added > self.limit:
            state = f"{held} {self.unit} {self.state}, {added} more would exceed {self.limit}"
            raise OverloadedError(f"{self.parameter}: {state}; retry later")

    def require_unless_empty(self, held: int, added: int) -> None:
        """As `require`, but where none are held any number fits: no limit makes a request impossible."""
        if held:
            self.require(held, added)


def require_deadline(predicted_ms: float, latency_ms: float | None) -> None:
    """Raise OverloadedError where an answer after `predicted_ms` is too late for the request's `latency_ms`."""
    if latency_ms is not None and predicted_ms > latency_ms:
        reason = f"got {latency_ms:g}, an answer is predicted after {predicted_ms:.0f} ms"
        raise OverloadedError(f"latency_ms: {reason}; retry later or elsewhere")


class TimeBound:
    """The longest time until an answer, as the setting `parameter` says; limit_ms 0: any.

    Answers come later than predicted, by how much differs with the load. So a prediction is held against the limit as
    late as hardly any recent one came true: times the smoothed ratio of taken to predicted time, plus four mean
    deviations of it. That is how RFC 6298 (section 2) bounds a round trip. Only predictions that came near the limit
    count: a short wait is off by more, and never refused.
    """

    def __init__(self, parameter: str, limit_ms: float) -> None:
        self._parameter = parameter
        self._limit_ms = limit_ms
        self._ratio, self._deviation = 1.0, _FIRST_DEVIATION

    def require(self, predicted_ms: float, latency_ms: float | None = None) -> None:
        """Raise OverloadedError where an answer that is predicted after `predicted_ms` may come beyond the limit.

        Or where it is too late for the request's `latency_ms`, which is held against the prediction as it is.
        """
        require_deadline(predicted_ms, latency_ms)
        latest_ms = predicted_ms * self._lateness
        if self._limit_ms and latest_ms > self._limit_ms:
            reason = f"an answer is predicted after {latest_ms:.0f} ms, the limit is {self._limit_ms:g} ms"
            raise OverloadedError(f"{self._parameter}: {reason}; retry later")

    def observe(self, predicted_ms: float, took_ms: float) -> None:
        """Record how long an answer took that was predicted after `predicted_ms`."""
        # Held against what is admitted now: else a time of great lateness would admit nothing that could end it.
        if predicted_ms * self._lateness < self._limit_ms / 2 or not self._limit_ms:
            return
        error = min(took_ms / predicted_ms, _MAX_LATENESS) - self._ratio
        self._deviation += _SMOOTHING * (abs(error) - self._deviation)
        self._ratio += _SMOOTHING * error

    @property
    def _lateness(self) -> float:
        return min(max(self._ratio + 4 * self._deviation, 1.0), _MAX_LATENESS)


def unloading() -> OverloadedError:
    """The error for a request that comes, or still waits, while its model is being unloaded."""
    return OverloadedError("the model is being unloaded; retry elsewhere")


class QueuedRequest(Protocol):
    """A request whose `slo_class` is a name or None. arrived: monotonic, in seconds."""

    @property
    def slo_class(self) -> str | None: ...

    @property
    def arrived(self) -> float: ...


OTHERS = "*"
"""Stands in a list of classes for all that it does not name."""
OVERTAKEN = 32
"""Most later requests that go before a waiting one because their class is more urgent."""


C = TypeVar("C", bound=QueuedRequest)


def classes_of(slo_classes: str) -> list[str]:
    """The names in the setting `slo_classes`, the most urgent one first. Raises InvalidInputError."""
    names = [name.strip() for name in slo_classes.split(",")]
    require(names.count(OTHERS) == 1, "slo_classes", slo_classes, "names with commas, one of them *")
    require(len({*names}) == len(names), "slo_classes", slo_classes, "each name once")
    return names


class SloClasses:
    """The classes of a front's requests, by their ranks: 0 for the most urgent one; and what those of each did.

    names: with `OTHERS` among them. Written under the lock of the queues.
    """

    def __init__(self, names: Sequence[str] = (OTHERS,)) -> None:
        self.names = list(names)
        self._ranks: dict[str | None, int] = {name: rank for rank, name in enumerate(names)}
        self._others = self._ranks[OTHERS]
        self.overtakes = 0
        self.waiting, self.started, self.overtaken = ([0] * len(names) for _ in range(3))
        self.waited_s = [0.0] * len(names)

    def rank(self, slo_class: str | None) -> int:
        """Of the class that a request names."""
        return self._ranks.get(slo_class, self._others)

    def start(self, rank: int, waited_s: float, passed: Collection[int]) -> None:
        """One goes, after it has waited so long, before an earlier one of each class in `passed`."""
        self.waiting[rank] -= 1
        self.started[rank] += 1
        self.waited_s[rank] += waited_s
        self.overtakes += bool(passed)
        for other in passed:
            self.overtaken[other] += 1

    def metrics(self) -> list[Counter | Gauges]:
        """What each class did."""
        ranks = list(enumerate(self.names))
        return [
            Counter(
                "overtakes_total",
                "Requests, texts or images that went before an earlier one of a less urgent slo_class",
                read=lambda: self.overtakes,
            ),
            *(
                Counter(
                    "class_started_total",
                    "Those whose wait has ended",
                    {"slo_class": name},
                    partial(self.started.__getitem__, rank),
                )
                for rank, name in ranks
            ),
            *(
                Counter(
                    "class_wait_seconds_total",
                    "Their waits, together",
                    {"slo_class": name},
                    partial(self.waited_s.__getitem__, rank),
                )
                for rank, name in ranks
            ),
            *(
                Counter(
                    "class_overtaken_total",
                    "Those that went before an earlier one of this class",
                    {"slo_class": name},
                    partial(self.overtaken.__getitem__, rank),
                )
                for rank, name in ranks
            ),
            Gauges(
                "class_waiting",
                "Requests, texts or images that wait",
                "slo_class",
                lambda: dict(zip(self.names, map(float, self.waiting), strict=True)),
            ),
        ]


class ClassQueue(Generic[C]):
    """Requests that wait. Iterated, in the order in which they go: by class, in a class by arrival.

    Where `most` later ones of more urgent classes have gone before one, it goes before all others. classes: counts
    what those here do. Not thread-safe.
    """

    def __init__(self, classes: SloClasses | None = None, most: int = OVERTAKEN) -> None:
        self.classes = classes or SloClasses()
        self._most = most
        # By rank. Of each request its place in the order of arrival, and since when it waits.
        self._lines: list[OrderedDict[C, tuple[float, float]]] = [OrderedDict() for _ in self.classes.names]
        self._length = 0
        self._next_place = 0
        # In order, the places of those that went before an earlier one that still waits.
        self._ahead: list[float] = []

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: C) -> bool:
        return request in self._lines[self.classes.rank(request.slo_class)]

    def __iter__(self) -> Iterator[C]:
        lines = [line for line in self._lines if line]
        if len(lines) == 1:
            yield from lines[0]
            return
        ahead = self._ahead.copy()
        rest = [iter(line.items()) for line in lines]
        heads = [next(each) for each in rest]
        while heads:
            places = [place for _, (place, _) in heads]
            # The earliest of all has been overtaken most often.
            first = min(places)
            is_due = len(ahead) - bisect_right(ahead, first) >= self._most
            turn = places.index(first) if is_due else 0
            if places[turn] > first:
                insort(ahead, places[turn])
            yield heads[turn][0]
            following = next(rest[turn], None)
            if following is None:
                del rest[turn], heads[turn]
            else:
                heads[turn] = following

    def add(self, request: C) -> None:
        """One more waits; it may have gone before, and gets its old place among those of its class then."""
        rank = self.classes.rank(request.slo_class)
        line, place = self._lines[rank], float(self._next_place)
        arrived = request.arrived
        later: list[C] = []
        if line and next(reversed(line)).arrived > arrived:
            # The last one first.
            later += itertools.takewhile(lambda other: other.arrived > arrived, reversed(line))
            place = line[later[-1]][0] - 0.5
        line[request] = (place, time.monotonic())
        for other in reversed(later):
            line.move_to_end(other)
        self._length += 1
        self._next_place += 1
        self.classes.waiting[rank] += 1

    def take(self, count: int, fits: Callable[[C], bool] | None = None) -> list[C]:
        """At most the first `count` requests, which go now; the first for which `fits` is false ends the list."""
        first = itertools.islice(self, count)
        taken = list(first if fits is None else itertools.takewhile(fits, first))
        for request in taken:
            self.start(request)
        return taken

    def start(self, request: C) -> None:
        """This one goes now, whatever its turn."""
        rank = self.classes.rank(request.slo_class)
        line = self._lines[rank]
        place, since = line.pop(request)
        self._length -= 1
        others = enumerate(self._lines) if self._length > len(line) else ()
        passed = [other for other, line in others if line and other != rank and _first_place(line) < place]
        if passed:
            insort(self._ahead, place)
        self.classes.start(rank, time.monotonic() - since, passed)
        self._forget()

    def remove(self, request: C) -> bool:
        """This one waits no longer, and does not go; False where it does not wait."""
        rank = self.classes.rank(request.slo_class)
        if self._lines[rank].pop(request, None) is None:
            return False
        self._length -= 1
        self.classes.waiting[rank] -= 1
        self._forget()
        return True

    def clear(self) -> list[C]:
        """Remove all, in order."""
        requests = list(self)
        for request in requests:
            self.remove(request)
        return requests

    def last_below(self, slo_class: str | None) -> C | None:
        """The last request of the least urgent class; None where no class is less urgent than `slo_class`."""
        less_urgent = self._lines[self.classes.rank(slo_class) + 1 :]
        return next((next(reversed(line)) for line in reversed(less_urgent) if line), None)

    def _forget(self) -> None:
        if self._ahead:
            first = min((_first_place(line) for line in self._lines if line), default=math.inf)
            del self._ahead[: bisect_right(self._ahead, first)]


def _first_place(line: Mapping[Any, tuple[float, float]]) -> float:
    return next(iter(line.values()))[0]
