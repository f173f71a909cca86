"""Which instance serves a request: Arlo's Request Scheduler (Algorithm 1) and alternatives.

Instances form levels, one for each static length, shortest first. Only the head of a level can be chosen: the instance
with the fewest outstanding requests, then the lowest id. Candidates are the first `peek` levels that are long
enough and have an instance. `choose` takes one decision from a description; `dispatcher` serves a running system.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shapeshift.polymorph.policy.algorithms import DISPATCHERS

Id = TypeVar("Id", int, str)


@dataclass(frozen=True)
class Rules:
    """How to decide.

    algorithm: one of `algorithms.DISPATCHERS`; threshold, decay: lambda and alpha of Algorithm 1; peek: its L, the
    number of candidate levels of every algorithm. Raises ValueError naming the field.
    """

    algorithm: str = "earliest_finish"
    threshold: float = 0.85
    decay: float = 0.9
    peek: int = 6

    def __post_init__(self) -> None:
        if self.algorithm not in DISPATCHERS:
            raise ValueError(f"algorithm: got {self.algorithm!r}; one of {', '.join(DISPATCHERS)}")
        if self.threshold < 0 or self.decay < 0:
            raise ValueError(f"threshold, decay: got {self.threshold}, {self.decay}; at least 0")
        if self.peek < 1:
            raise ValueError(f"peek: got {self.peek}; at least 1")


@dataclass(frozen=True)
class Instance(Generic[Id]):
    """One instance: requests queued and running, and how many it serves within the SLO (> 0)."""

    id: Id
    outstanding: int
    capacity: float


@dataclass(frozen=True)
class Level(Generic[Id]):
    """The instances of one static length. service_ms: of one request; `earliest_finish` needs it."""

    max_length: int
    instances: tuple[Instance[Id], ...] = ()
    service_ms: float | None = None


def _finish(outstanding: int, capacity: float, service_ms: float) -> float:
    return (outstanding + 1) * service_ms


def _congestion(outstanding: int, capacity: float, service_ms: float) -> float:
    return outstanding / capacity


def _least(scores: list[float], rules: Rules) -> int:
    return scores.index(min(scores))


def _first(scores: list[float], rules: Rules) -> int:
    return 0


def _multilevel(scores: list[float], rules: Rules) -> int:
    """Lines 6 to 20 of Algorithm 1."""
    threshold = rules.threshold
    for place, congestion in enumerate(scores):
        if congestion < threshold:
            return place
        threshold *= rules.decay
    return 0


Score = Callable[[int, float, float], float]
Pick = Callable[[list[float], Rules], int]

# The algorithms that score each candidate's head and pick one of the scores.
SCORED: dict[str, tuple[Score, Pick]] = {
    "earliest_finish": (_finish, _least),
    "multilevel": (_congestion, _multilevel),
    "intra_group": (_congestion, _first),
    "inter_group": (_congestion, _least),
}


def scoring(algorithm: str) -> tuple[Score, Pick]:
    """How the algorithm scores and picks. Raises ValueError for one that does not (`bin_packing`)."""
    if algorithm not in SCORED:
        raise ValueError(f"algorithm: got {algorithm!r}; one of {', '.join(SCORED)}")
    return SCORED[algorithm]


def choose(length: int, levels: Sequence[Level[Id]], rules: Rules) -> tuple[int, Id] | None:
    """The level (its index in `levels`, ascending by max_length) and instance; None if no level can take it.

    rules.algorithm: one of SCORED. Raises ValueError where `earliest_finish` has no service time.
    """
    score, pick = scoring(rules.algorithm)
    candidates = [index for index, level in enumerate(levels) if level.max_length >= length and level.instances]
    if not candidates:
        return None
    candidates = candidates[: rules.peek]
    heads = [min(levels[index].instances, key=lambda one: (one.outstanding, one.id)) for index in candidates]
    services = [_service(rules, levels[index].service_ms) for index in candidates]
    scores = [score(head.outstanding, head.capacity, ms) for head, ms in zip(heads, services, strict=True)]
    place = pick(scores, rules)
    return candidates[place], heads[place].id


def _service(rules: Rules, service_ms: float | None) -> float:
    if service_ms is None and rules.algorithm == "earliest_finish":
        raise ValueError("service_ms: got None; earliest_finish needs it")
    return service_ms or 0.0
