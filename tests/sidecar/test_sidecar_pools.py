"""Dividing the workers of a pool among its fronts."""

from __future__ import annotations

import random

import pytest

from shapeshift.sidecar.observe import Traffic
from shapeshift.sidecar.policy import decide
from shapeshift.sidecar.policy.pools import FrontPeriod, split
from tests.sidecar.fakes import front


@pytest.mark.parametrize("seed", range(200))
def test_all_workers_are_assigned_within_the_bounds(seed: int) -> None:
    source = random.Random(seed)
    fronts = source.randint(1, 6)
    weights = [source.choice([0.0, source.uniform(0, 20), 1e-9, 1e9]) for _ in range(fronts)]
    least = [source.randint(0, 3) for _ in range(fronts)]
    most = [low + source.randint(0, 10) for low in least]
    total = source.randint(1, 30)
    found = split(total, weights, least, most)
    assert sum(found) == min(total, sum(most)) if sum(least) <= total else sum(found) == total
    if sum(least) <= total:
        assert all(low <= count <= high for low, count, high in zip(least, found, most, strict=True))
    else:
        assert all(count <= low for count, low in zip(found, least, strict=True))
        assert total < fronts or all(count >= min(low, 1) for count, low in zip(found, least, strict=True))


@pytest.mark.parametrize("seed", range(50))
def test_a_greater_weight_never_gets_less(seed: int) -> None:
    source = random.Random(seed)
    weights = [source.uniform(0, 10) for _ in range(4)]
    found = split(source.randint(4, 40), weights, [1] * 4, [40] * 4)
    order = sorted(range(4), key=weights.__getitem__)
    assert [found[index] for index in order] == sorted(found)


def test_shares_follow_the_demand() -> None:
    assert split(8, [3.0, 1.0], [1, 1], [8, 8]) == [6, 2]
    assert split(8, [0.0, 5.0], [1, 1], [8, 8]) == [1, 7]
    assert split(8, [0.0, 0.0], [1, 1], [8, 8]) == [4, 4]
    assert split(8, [9.0, 1.0], [1, 1], [4, 8]) == [4, 4]
    assert split(3, [9.0, 1.0], [3, 2], [8, 8]) == [2, 1]


def test_a_share_is_kept_while_it_is_close_to_its_proportion() -> None:
    assert split(8, [4.6, 3.4], [1, 1], [8, 8], current=[4, 4]) == [4, 4]
    assert split(8, [4.9, 3.1], [1, 1], [8, 8], current=[4, 4]) == [5, 3]
    assert split(8, [4.6, 3.4], [1, 5], [8, 8], current=[4, 4]) == [3, 5]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, [1.0], [0], [1]), "total"),
        ((1, [], [], []), "weights"),
        ((1, [1.0], [0, 0], [1]), "weights"),
        ((1, [-1.0], [0], [1]), "weights"),
        ((1, [float("nan")], [0], [1]), "weights"),
        ((1, [1.0], [2], [1]), "least"),
    ],
)
def test_invalid_arguments_are_named(arguments: tuple[int, list[float], list[int], list[int]], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        split(*arguments)


def period(name: str, workers: int, **texts: float) -> FrontPeriod:
    one = front(name, worker_pool="cpu", pool_workers=6, workers=3, min_workers=1, max_workers=6)
    have = {f"{name}_w{number:02d}": (512, 32, 128)[number % 3] for number in range(workers)}
    spare = [f"{name}_w{number:02d}" for number in range(workers, 6)]
    return FrontPeriod(one, have, spare, Traffic(100.0, {float(key[1:]): value for key, value in texts.items()}), 6)


def test_a_busy_front_gets_more_of_the_pool() -> None:
    decisions = decide.decide_group([period("busy", 3, t32=20_000, t512=3_000), period("calm", 3, t32=100)])
    assert [one.name for one, _ in decisions] == ["calm", "busy"]
    calm, busy = (decision for _, decision in decisions)
    assert sum(calm.counts) + sum(busy.counts) == 6
    assert sum(busy.counts) > 3
    assert [action.kind for action in calm.actions if action.kind != "change"] == ["unload"] * (3 - sum(calm.counts))
    assert [action.kind for action in busy.actions if action.kind != "change"] == ["load"] * (sum(busy.counts) - 3)
    assert "pool cpu: " in busy.reason
    assert f"{sum(busy.counts)} of 6 workers" in busy.reason


def test_shares_without_traffic_stay() -> None:
    decisions = decide.decide_group([period("one", 4, t32=3), period("two", 2)])
    assert [sum(decision.counts) for _, decision in decisions] == [4, 2]
    assert [decision.actions for _, decision in decisions] == [(), ()]


def test_a_new_front_gets_a_share_of_a_full_pool() -> None:
    decisions = {
        one.name: decision for one, decision in decide.decide_group([period("old", 6, t32=5000), period("new", 0)])
    }
    assert sum(decisions["new"].counts) >= 1
    assert sum(decisions["new"].counts) + sum(decisions["old"].counts) == 6
