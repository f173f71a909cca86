"""How many tokens each queue may hold (Chameleon, section 4.2, "Assigning quotas per queue")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QueueLoad:
    """largest: tokens of the largest request (S); duration_s: mean run time (D); rate: arrivals per second (lambda)."""

    largest: float
    duration_s: float
    rate: float


@dataclass(frozen=True)
class Quotas:
    """Tokens by queue. tok_min: what each queue needs to meet the objective; quota: what it gets."""

    tok_min: tuple[float, ...]
    quota: tuple[float, ...]


def tok_min(load: QueueLoad, slo_s: float) -> float:
    """Tok_min = S D (lambda + 1/SLO): with it the M/M/1 queue of service rate Tok/(S D) meets the objective.

    At least S; otherwise the quota could never admit the largest request of the queue.
    """
    return max(load.largest * load.duration_s * (load.rate + 1 / slo_s), load.largest)


def assign(queues: Sequence[QueueLoad], total: float, slo_s: float) -> Quotas:
    """Divide `total` tokens among the queues, in proportion to Tok_min if the sum of Tok_min fits.

    Otherwise each queue gets its S, and the rest is divided in proportion to Tok_min - S. If the sum of S does not fit,
    `total` is divided in proportion to S. Requires largest > 0, total >= 0 and slo_s > 0.
    """
    needs = [tok_min(load, slo_s) for load in queues]
    if sum(needs) <= total:
        return Quotas(tuple(needs), _in_proportion(total, needs))
    sizes = [load.largest for load in queues]
    rest = total - sum(sizes)
    if rest < 0:
        return Quotas(tuple(needs), _in_proportion(total, sizes))
    above = [tokens - size for tokens, size in zip(needs, sizes, strict=True)]
    extra = _in_proportion(rest, above)
    return Quotas(tuple(needs), tuple(size + more for size, more in zip(sizes, extra, strict=True)))


def _in_proportion(total: float, weights: Sequence[float]) -> tuple[float, ...]:
    whole = sum(weights)
    return tuple(total * weight / whole for weight in weights)
