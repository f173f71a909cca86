"""How many tokens each queue may hold (Chameleon, section 4.2, "Assigning quotas per queue")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QueueLoad:
    """largest: tokens of its largest request (S); duration_s: of a request (D); rate: arrivals a second (lambda)."""

    largest: float
    duration_s: float
    rate: float


@dataclass(frozen=True)
class Quotas:
    """least: Tok_min of each queue; quota: what each gets. Tokens."""

    least: tuple[float, ...]
    quota: tuple[float, ...]


def least(load: QueueLoad, slo_s: float) -> float:
    """Tok_min = S D (lambda + 1/SLO): the M/M/1 queue of rate Tok/(S D) stays within the objective.

    At least S, or the queue's largest request could never be admitted from its own quota.
    """
    return max(load.largest * load.duration_s * (load.rate + 1 / slo_s), load.largest)


def assign(queues: Sequence[QueueLoad], total: float, slo_s: float) -> Quotas:
    """`total` tokens among the queues: in proportion to Tok_min where these fit.

    Otherwise each gets its S, and the rest goes in proportion to Tok_min - S; where not even these fit, `total` in
    proportion to S. largest above 0, total 0 or more, slo_s above 0.
    """
    wanted = [least(load, slo_s) for load in queues]
    if sum(wanted) <= total:
        return Quotas(tuple(wanted), _in_proportion(total, wanted))
    sizes = [load.largest for load in queues]
    rest = total - sum(sizes)
    if rest < 0:
        return Quotas(tuple(wanted), _in_proportion(total, sizes))
    above = [most - size for most, size in zip(wanted, sizes, strict=True)]
    more = _in_proportion(rest, above)
    return Quotas(tuple(wanted), tuple(size + extra for size, extra in zip(sizes, more, strict=True)))


def _in_proportion(total: float, weights: Sequence[float]) -> tuple[float, ...]:
    whole = sum(weights)
    return tuple(total * weight / whole for weight in weights)
