"""The JSON API of the policies: `shapeshift policy adapter_cache.*`."""

from __future__ import annotations

from typing import Any

from shapeshift.adapter_cache.policy import bypass, cluster, quotas, request_size
from shapeshift.adapter_cache.policy.eviction import EvictEntry
from shapeshift.adapter_cache.policy.quota_admission import TwoPhase
from shapeshift.adapter_cache.settings import EVICTION_RULES, UNUSED
from shapeshift.errors import InvalidInputError
from shapeshift.policy_api import OptionalField, Policy, boolean, identifier, integer, list_of, nullable, number, record

_MAX_POINTS = 10_000
_MAX_CLUSTERS = 1000


def _evict(entries: list[EvictEntry], now: float, need: float, clock: float, algorithm: str) -> dict[str, Any]:
    ids = [entry.id for entry in entries]
    if len(set(map(type, ids))) > 1:
        raise InvalidInputError("entries", ids, "ids that are all whole numbers or all strings")
    if len(set(ids)) < len(ids):
        raise InvalidInputError("entries", ids, "ids without duplicates")
    evicted, after = EVICTION_RULES[algorithm].choose(entries, need, clock, now)
    return {"evict": evicted, "clock": after}


def _size(
    input: float, output: float, rank: float, max_input: float, max_output: float, max_rank: float
) -> dict[str, Any]:
    return {"wrs": request_size.weighted(input, output, rank, request_size.Largest(max_input, max_output, max_rank))}


def _cluster(x: list[float], k: int | None, max_k: int) -> dict[str, Any]:
    if len(x) > _MAX_POINTS:
        raise InvalidInputError("x", f"{len(x)} values", f"at most {_MAX_POINTS}")
    clusters = cluster.cluster(x, k, max_k)
    centroids, cutoffs = list(clusters.centroids), list(clusters.cutoffs)
    return {"k": clusters.k, "wcss": clusters.wcss, "centroids": centroids, "cutoffs": cutoffs}


def _quota(queues: list[quotas.QueueLoad], total: float, slo: float) -> dict[str, Any]:
    shares = quotas.assign(queues, total, slo)
    return {"tok_min": list(shares.tok_min), "quota": list(shares.quota)}


def _event(name: str, value: Any) -> tuple[Any, ...]:
    """["submit", queue, id, tokens], ["finish", id] or ["step"]."""
    kinds = {"submit": (integer(minimum=0), identifier, number(above=0)), "finish": (identifier,), "step": ()}
    is_list = isinstance(value, list) and value and isinstance(value[0], str)
    if not is_list or value[0] not in kinds or len(value) != 1 + len(kinds[value[0]]):
        raise InvalidInputError(name, value, '["submit", queue, id, tokens], ["finish", id] or ["step"]')
    checks = kinds[value[0]]
    rest = [check(f"{name}[{at}]", one) for at, (check, one) in enumerate(zip(checks, value[1:], strict=True), 1)]
    return value[0], *rest


def _admit(quota: list[float], events: list[tuple[Any, ...]]) -> dict[str, Any]:
    admission: TwoPhase[int | str] = TwoPhase(quota)
    seen: set[int | str] = set()
    steps = []
    for at, (kind, *rest) in enumerate(events):
        if kind == "submit":
            queue, name, tokens = rest
            if queue >= len(quota):
                raise InvalidInputError(f"events[{at}][1]", queue, f"below the number of queues ({len(quota)})")
            if name in seen:
                raise InvalidInputError(f"events[{at}][2]", name, "an id that is not submitted twice")
            seen.add(name)
            admission.submit(queue, name, tokens)
        elif kind == "finish":
            admission.finish(rest[0])
        else:
            steps.append(list(map(list, admission.step())))
    return {"steps": steps, "used": admission.ledger.used}


def _bypass(
    head_wait_s: float, head_need: float, candidate_need: float, candidate_predicted_s: float, free: float
) -> dict[str, Any]:
    return {"bypass": bypass.allowed(head_wait_s, head_need, candidate_need, candidate_predicted_s, free)}


_NOT_NEGATIVE = number(minimum=0)
_ENTRY = record(
    {
        "id": identifier,
        "size": _NOT_NEGATIVE,
        "freq": _NOT_NEGATIVE,
        "last": number(),
        "rc": integer(minimum=0),
        "queued": boolean,
        "pinned": OptionalField(boolean, False),
        "base": OptionalField(number(), 0.0),
    },
    EvictEntry,
)
_QUEUE = record(
    {"S": number(above=0), "D": _NOT_NEGATIVE, "lam": _NOT_NEGATIVE},
    lambda S, D, lam: quotas.QueueLoad(S, D, lam),  # noqa: N803
)

POLICIES = (
    Policy(
        "adapter_cache.evict",
        "which cached adapters are evicted",
        _evict,
        {
            "entries": list_of(_ENTRY),
            "now": number(),
            "need": number(),
            "clock": OptionalField(number(), 0.0),
        },
        tuple(name for name in EVICTION_RULES if name != UNUSED),
    ),
    Policy(
        "adapter_cache.size",
        "the weighted request size, from prompt, answer and rank",
        _size,
        {
            "input": _NOT_NEGATIVE,
            "output": _NOT_NEGATIVE,
            "rank": _NOT_NEGATIVE,
            "max_input": number(above=0),
            "max_output": number(above=0),
            "max_rank": number(above=0),
        },
    ),
    Policy(
        "adapter_cache.cluster",
        "the number of queues, and the cutoffs between their sizes",
        _cluster,
        {
            "x": list_of(number(), min_length=1),
            "k": OptionalField(nullable(integer(minimum=1, maximum=_MAX_CLUSTERS)), None),
            "max_k": OptionalField(integer(minimum=1, maximum=_MAX_CLUSTERS), 4),
        },
    ),
    Policy(
        "adapter_cache.quota",
        "how many tokens the requests of each queue may hold",
        _quota,
        {
            "queues": list_of(_QUEUE, min_length=1),
            "total": _NOT_NEGATIVE,
            "slo": number(above=0),
        },
    ),
    Policy(
        "adapter_cache.admit",
        "which requests two-phase admission takes from queues with quotas",
        _admit,
        {"quota": list_of(_NOT_NEGATIVE, min_length=1), "events": list_of(_event)},
    ),
    Policy(
        "adapter_cache.bypass",
        "whether a request may overtake a head that waits for memory",
        _bypass,
        {
            "head_wait_s": _NOT_NEGATIVE,
            "head_need": _NOT_NEGATIVE,
            "candidate_need": _NOT_NEGATIVE,
            "candidate_predicted_s": _NOT_NEGATIVE,
            "free": _NOT_NEGATIVE,
        },
    ),
)
