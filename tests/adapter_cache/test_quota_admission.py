"""Quotas and two-phase admission by hand, against a plain implementation of the rules, and without starvation."""

from __future__ import annotations

import random

import pytest

from shapeshift.adapter_cache.policy.bypass import allowed, head_wait_s
from shapeshift.adapter_cache.policy.quota_admission import TwoPhase
from shapeshift.adapter_cache.policy.quotas import QueueLoad, assign, tok_min
from shapeshift.adapter_cache.policy.request_size import Largest, weighted


def test_sizes_are_weighted_and_clipped() -> None:
    largest = Largest(100, 200, 64)
    assert weighted(50, 50, 32, largest) == pytest.approx(0.3 * 0.5 + 0.5 * 0.25 + 0.2 * 0.5)
    assert weighted(1000, 1000, 1000, largest) == pytest.approx(1.0)
    assert weighted(0, 0, 0, largest) == 0
    assert weighted(5, 5, 0, Largest(10, 10, 0)) == pytest.approx(0.4)


def test_tok_min_keeps_an_mm1_queue_within_its_objective() -> None:
    load = QueueLoad(largest=100, duration_s=2.0, rate=3.0)
    tokens = tok_min(load, slo_s=0.5)
    service_rate = tokens / (load.largest * load.duration_s)
    assert 1 / (service_rate - load.rate) == pytest.approx(0.5)
    assert tok_min(QueueLoad(100, 0.001, 0.0), 10.0) == 100


def test_quotas_in_their_three_cases() -> None:
    loads = [QueueLoad(10, 1.0, 2.0), QueueLoad(100, 1.0, 1.0)]
    loose = assign(loads, 480, slo_s=1.0)
    assert loose.tok_min == (30, 200) and loose.quota == pytest.approx((480 * 30 / 230, 480 * 200 / 230))
    tight = assign(loads, 170, slo_s=1.0)
    assert tight.quota == pytest.approx((10 + 60 * 20 / 120, 100 + 60 * 100 / 120))
    assert assign(loads, 55, slo_s=1.0).quota == pytest.approx((5, 50))


@pytest.mark.parametrize("seed", range(20))
def test_quotas_share_out_the_total_and_hold_the_largest(seed: int) -> None:
    rng = random.Random(seed)
    loads = [QueueLoad(rng.randint(1, 500), rng.random() * 5, rng.random() * 20) for _ in range(rng.randint(1, 4))]
    total = rng.randint(1, 5000)
    found = assign(loads, total, rng.random() * 10 + 0.1)
    assert sum(found.quota) == pytest.approx(total)
    if sum(load.largest for load in loads) <= total:
        assert all(quota >= load.largest - 1e-9 for quota, load in zip(found.quota, loads, strict=True))


def test_phases_by_hand() -> None:
    made: TwoPhase[str] = TwoPhase([10, 20, 30])
    for queue, name, tokens in ((0, "a", 6), (0, "b", 6), (2, "c", 25), (2, "d", 10)):
        made.submit(queue, name, tokens)
    # b borrows 2 of the 20 tokens of queue 1; d then has 5 of its own and may borrow 18 - 2.
    assert made.step() == (["a", "c"], ["b", "d"])
    assert made.ledger.used == [12, 0, 35]
    assert made.step() == ([], [])
    made.finish("a")
    made.finish("nobody")
    assert made.ledger.used == [6, 0, 35]


def test_a_waiting_queue_keeps_what_is_left_of_its_quota() -> None:
    made: TwoPhase[str] = TwoPhase([10, 30])
    made.submit(1, "large", 20)
    made.step()
    made.submit(1, "next", 20)
    for number in range(10):
        made.submit(0, f"small{number}", 5)
    assert made.step() == (["small0", "small1"], [])
    made.finish("large")
    assert made.step() == (["next"], ["small2", "small3"]), "no request waits behind it any more"


def steps_of(quota: list[float], events: list[tuple]) -> tuple[list, list]:
    """A plain implementation of the rules."""
    waiting: list[list[tuple[str, float]]] = [[] for _ in quota]
    running: dict[str, tuple[int, float]] = {}
    steps = []

    def used(queue: int) -> float:
        return sum(tokens for other, tokens in running.values() if other == queue)

    for kind, *rest in events:
        if kind == "submit":
            waiting[rest[0]].append((rest[1], rest[2]))
        elif kind == "finish":
            running.pop(rest[0], None)
        else:
            phases: list[list[str]] = [[], []]
            for phase in (0, 1):
                for queue in range(len(quota)):
                    while waiting[queue]:
                        left = [max(0, each - used(at)) for at, each in enumerate(quota)]
                        free = sum(quota) - sum(used(at) for at in range(len(quota)))
                        spare = sum(left[at] for at in range(len(quota)) if at != queue and not waiting[at])
                        borrowed = sum(max(0, used(at) - each) for at, each in enumerate(quota))
                        limit = left[queue] + (max(0, spare - borrowed) if phase else 0)
                        name, tokens = waiting[queue][0]
                        if tokens > min(limit, free):
                            break
                        waiting[queue].pop(0)
                        running[name] = (queue, tokens)
                        phases[phase].append(name)
            steps.append(phases)
    return steps, [used(queue) for queue in range(len(quota))]


@pytest.mark.parametrize("seed", range(40))
def test_the_phases_agree_with_the_plain_implementation(seed: int) -> None:
    rng = random.Random(seed)
    quota = [float(rng.randint(0, 40)) for _ in range(rng.randint(1, 4))]
    events: list[tuple] = []
    for number in range(80):
        kind = rng.random()
        if kind < 0.5:
            events.append(("submit", rng.randrange(len(quota)), f"r{number}", rng.randint(1, 30)))
        elif kind < 0.75:
            events.append(("finish", f"r{rng.randrange(80)}"))
        else:
            events.append(("step",))
    made: TwoPhase[str] = TwoPhase(quota)
    steps = []
    for kind, *rest in events:
        if kind == "step":
            steps.append(list(made.step()))
        else:
            getattr(made, kind)(*rest)
    expected, used = steps_of(quota, events)
    assert (steps, made.ledger.used) == (expected, used)
    assert sum(used) <= sum(quota)


@pytest.mark.parametrize("seed", range(10))
def test_small_requests_never_starve_a_large_one(seed: int) -> None:
    """A large request that fits into the quota of its queue is admitted while small ones keep arriving."""
    rng = random.Random(seed)
    quota = [20.0, 30.0, 40.0]
    made: TwoPhase[str] = TwoPhase(quota)
    running: dict[str, int] = {}
    waited: dict[str, int] = {}
    served = 0
    for step in range(400):
        for number in range(rng.randint(2, 6)):
            made.submit(0, f"s{step}.{number}", rng.randint(1, 10))
        if step % 4 == 0:
            made.submit(rng.choice((1, 2)), f"L{step}", 30)
            waited[f"L{step}"] = step
        for name in [name for name, ends in running.items() if ends <= step]:
            made.finish(name)
            del running[name]
        for phase in made.step():
            for name in phase:
                running[name] = step + rng.randint(1, 5)
                served += name.startswith("L")
                if name.startswith("L"):
                    del waited[name]
    assert served >= 90
    assert all(step - since < 60 for step, since in ((400, since) for since in waited.values()))


def test_bypass() -> None:
    def may(**changed: float) -> bool:
        given = {"head_wait_s": 2.0, "head_need": 100, "candidate_need": 10, "candidate_predicted_s": 1.0, "free": 50}
        return allowed(**{**given, **changed})

    assert may() and may(candidate_predicted_s=2.0) and may(candidate_need=50) and may(head_need=51)
    assert not may(candidate_predicted_s=2.1)
    assert not may(candidate_need=51)
    assert not may(head_need=50), "a head that fits is not overtaken"


def test_the_head_waits_for_the_requests_that_free_its_memory() -> None:
    running = [(30, 5.0), (10, 2.0), (20, 3.0)]
    assert head_wait_s(2.0, running, 0.1) == pytest.approx(1.0)
    assert head_wait_s(5.0, running, 0.1) == pytest.approx(2.0)
    assert head_wait_s(5.5, running, 0.1) == pytest.approx(3.0)
    assert head_wait_s(500, running, 0.1) == pytest.approx(3.0)
    assert head_wait_s(1.0, [], 0.1) == 0
