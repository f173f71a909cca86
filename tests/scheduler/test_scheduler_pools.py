"""How a pool's workers are divided among its fronts."""

from __future__ import annotations

import random

import pytest

from shapeshift.scheduler import sharing
from shapeshift.scheduler.observe import Load
from shapeshift.scheduler.pools import split
from shapeshift.scheduler.settings import SchedulerSettings
from shapeshift.scheduler.sharing import Member
from tests.scheduler.fakes import front

SETTINGS = SchedulerSettings()


@pytest.mark.parametrize("seed", range(200))
def test_all_workers_are_given_within_the_bounds(seed: int) -> None:
    source = random.Random(seed)
    fronts = source.randint(1, 6)
    asked = [source.choice([0.0, source.uniform(0, 20), 1e-9, 1e9]) for _ in range(fronts)]
    least = [source.randint(0, 3) for _ in range(fronts)]
    most = [low + source.randint(0, 10) for low in least]
    total = source.randint(1, 30)
    found = split(total, asked, least, most)
    assert sum(found) == min(total, sum(most)) if sum(least) <= total else sum(found) == total
    if sum(least) <= total:
        assert all(low <= count <= high for low, count, high in zip(least, found, most, strict=True))
    else:
        assert all(count <= low for count, low in zip(found, least, strict=True))
        assert total < fronts or all(count >= min(low, 1) for count, low in zip(found, least, strict=True))


@pytest.mark.parametrize("seed", range(50))
def test_who_asks_for_more_gets_no_less(seed: int) -> None:
    source = random.Random(seed)
    asked = [source.uniform(0, 10) for _ in range(4)]
    found = split(source.randint(4, 40), asked, [1] * 4, [40] * 4)
    order = sorted(range(4), key=asked.__getitem__)
    assert [found[index] for index in order] == sorted(found)


def test_shares_follow_the_demand() -> None:
    assert split(8, [3.0, 1.0], [1, 1], [8, 8]) == [6, 2]
    assert split(8, [0.0, 5.0], [1, 1], [8, 8]) == [1, 7]
    assert split(8, [0.0, 0.0], [1, 1], [8, 8]) == [4, 4]
    assert split(8, [9.0, 1.0], [1, 1], [4, 8]) == [4, 4]
    assert split(3, [9.0, 1.0], [3, 2], [8, 8]) == [2, 1]


def test_a_share_stays_while_it_is_nearly_right() -> None:
    assert split(8, [4.6, 3.4], [1, 1], [8, 8], have=[4, 4]) == [4, 4]
    assert split(8, [4.9, 3.1], [1, 1], [8, 8], have=[4, 4]) == [5, 3]
    assert split(8, [4.6, 3.4], [1, 5], [8, 8], have=[4, 4]) == [3, 5]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, [1.0], [0], [1]), "total"),
        ((1, [], [], []), "asked"),
        ((1, [1.0], [0, 0], [1]), "asked"),
        ((1, [-1.0], [0], [1]), "asked"),
        ((1, [float("nan")], [0], [1]), "asked"),
        ((1, [1.0], [2], [1]), "least"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[int, list[float], list[int], list[int]], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        split(*arguments)


def member(name: str, workers: int, **texts: float) -> Member:
    one = front(name, worker_pool="cpu", pool_workers=6, workers=3, min_workers=1, max_workers=6)
    have = {f"{name}_w{number:02d}": (512, 32, 128)[number % 3] for number in range(workers)}
    spare = [f"{name}_w{number:02d}" for number in range(workers, 6)]
    return Member(one, have, spare, Load(100.0, {float(key[1:]): value for key, value in texts.items()}), 6)


def test_a_pool_goes_to_the_front_that_is_busy_and_says_so() -> None:
    decisions = sharing.decide_all([member("busy", 3, t32=20_000, t512=3_000), member("calm", 3, t32=100)], SETTINGS)
    assert [one.name for one, _ in decisions] == ["calm", "busy"]
    calm, busy = (decision for _, decision in decisions)
    assert sum(calm.counts) + sum(busy.counts) == 6
    assert sum(busy.counts) > 3
    assert [action.kind for action in calm.actions if action.kind != "change"] == ["unload"] * (3 - sum(calm.counts))
    assert [action.kind for action in busy.actions if action.kind != "change"] == ["load"] * (sum(busy.counts) - 3)
    assert "pool cpu: " in busy.reason
    assert f"{sum(busy.counts)} of 6 workers" in busy.reason


def test_a_pool_without_traffic_stays() -> None:
    decisions = sharing.decide_all([member("one", 4, t32=3), member("two", 2)], SETTINGS)
    assert [sum(decision.counts) for _, decision in decisions] == [4, 2]
    assert [decision.actions for _, decision in decisions] == [(), ()]


def test_a_new_front_gets_its_part_of_a_full_pool() -> None:
    decisions = {
        one.name: decision
        for one, decision in sharing.decide_all([member("old", 6, t32=5000), member("new", 0)], SETTINGS)
    }
    assert sum(decisions["new"].counts) >= 1
    assert sum(decisions["new"].counts) + sum(decisions["old"].counts) == 6
